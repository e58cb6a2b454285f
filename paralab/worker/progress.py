"""The course of a training around its steps: where it begins, when it saves, and where it stops."""

from __future__ import annotations

from pathlib import Path

import torch

from paralab.plan.batches import GlobalBatch
from paralab.record.checkpoints import CheckpointPolicy
from paralab.worker.checkpoint import Parts, Saver
from paralab.worker.inject import planted
from paralab.worker.optimizer import make_scheduler
from paralab.worker.rank_context import Pass, RankContext, Strategy
from paralab.worker.status import Pulse
from paralab.workload.randomness import seed_everything

REBUILDS_BUCKETS = ("ddp", "hybrid")


class TrainingProgress:
    def __init__(
        self,
        job: RankContext,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        keeping: CheckpointPolicy | None,
        pulse: Pulse,
    ) -> None:
        self.job, self.strategy, self.optimizer, self.keeping, self.pulse = (
            job,
            strategy,
            optimizer,
            keeping,
            pulse,
        )
        self.scheduler = make_scheduler(job.workload, optimizer)
        self.done = keeping.done if keeping else 0
        self.stopped = False
        self.epoch = 0
        self.samples = keeping.samples if keeping else 0
        self.parts = Parts(job, strategy.model, optimizer, self.scheduler)
        self.saver = (
            Saver(self.parts, Path(keeping.directory), keeping.keep, job.probe) if keeping else None
        )
        self.saved_at = self.done
        job.probe.only_finite = keeping is not None
        planted("start", job.rank.rank, -1, strategy.model)

    def begins(self, batch: GlobalBatch, passes: list[Pass]) -> bool:
        """May this step begin? The first one of a resumed training restores it before."""
        if self.keeping and self.keeping.resume and batch.step == self.keeping.done:
            self._restore(Path(self.keeping.resume), passes)
        if self.pulse.stops_before(batch.step):
            self.stopped = True
            return False
        self.pulse.enter("step", batch.step)
        planted("step", self.job.rank.rank, batch.step, self.strategy.model)
        return True

    def step_scheduler(self, stepped: bool) -> None:
        if self.scheduler and stepped:  # a step that the GradScaler skipped is no step
            self.scheduler.step()

    def ends(self, batch: GlobalBatch) -> None:
        if self.saver and self.done == (self.keeping.done if self.keeping else 0):
            self.saver.prepare()
        self.done = batch.step + 1
        self.samples += batch.size
        self.epoch = batch.epoch
        if (
            self.saver
            and self.keeping
            and self.keeping.every
            and self.done % self.keeping.every == 0
        ):
            self._save(self.saver)
        elif self.saver:
            self.saver.poll()

    def finish(self) -> None:
        """The state at the end is saved as well, whether all steps are done or the rest is for
        another time."""
        if self.saver:
            if self.done > self.saved_at:
                self._save(self.saver)
            self.pulse.enter("save", self.done)
            self.saver.finish()

    def _save(self, saver: Saver) -> None:
        self.pulse.enter("save", self.done)
        self.job.probe.finish()  # a loss that is not finite ends the training here: such a state is not worth saving
        saver.begin(self.done, self.samples, self.epoch)
        self.pulse.enter("step", self.done)
        self.saved_at = self.done

    def _restore(self, folder: Path, passes: list[Pass]) -> None:
        plan = self.job.plan
        if plan.strategy in REBUILDS_BUCKETS and not plan.schedule:
            # DDP lays out its buckets anew after the first backward pass. With three ranks and
            # more, the layout decides in which order numbers are added, so the training goes on bit
            # for bit only with the layout it had: one pass is thrown away.
            self.strategy.forward_backward(passes)
            self.optimizer.zero_grad(set_to_none=True)
            self.job.probe.discard()
        assert self.keeping
        seed = (plan.seed + 1 + self.job.rank.rank + 1_000_003 * self.keeping.done) % 2**32
        seed_everything(seed)
        if self.job.streams:
            self.job.streams.seed(seed)
        self.parts.restore(folder, self.keeping.same_topology)
        self.job.probe.emit(
            "resume",
            step=self.keeping.done,
            folder=folder.name,
            same_topology=self.keeping.same_topology,
        )
