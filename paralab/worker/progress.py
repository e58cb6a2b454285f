"""Track a run's progress: its first step, when it saves, and when it stops."""

from __future__ import annotations

from pathlib import Path

import torch

from paralab.plan.batches import GlobalBatch
from paralab.plan.request import BUCKETED
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.status_board import StatusBoard
from paralab.worker.checkpoints.checkpoint import Saver
from paralab.worker.checkpoints.training_state import TrainingState
from paralab.worker.inject import inject_fault
from paralab.worker.optimizer import make_scheduler
from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy
from paralab.workload.randomness import seed_everything


class TrainingProgress:
    """`done` is the number of finished steps. `stopped` says whether the launcher stopped the run
    early.

    A run without a checkpoint policy never saves.
    """

    def __init__(
        self,
        context: RankContext,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        policy: CheckpointPolicy | None,
        board: StatusBoard,
    ) -> None:
        self.context, self.strategy, self.optimizer = context, strategy, optimizer
        self.policy, self.board, self.rank = policy, board, context.rank.rank
        self.scheduler = make_scheduler(context.workload, optimizer)
        self.first = self.done = self.saved_at = policy.done if policy else 0
        self.samples = policy.samples if policy else 0
        self.epoch = 0
        self.stopped = False
        self.state = TrainingState(context, strategy, optimizer, self.scheduler)
        self.saver = Saver(self.state, policy, context.probe) if policy else None
        context.probe.only_finite = policy is not None
        inject_fault("start", self.rank, -1, strategy.model)

    def begin_step(self, batch: GlobalBatch, accumulation_steps: list[AccumulationStep]) -> bool:
        """Return whether this step may begin. A resumed run first restores its checkpoint."""
        if self.policy and self.policy.resume and batch.step == self.first:
            self._restore(self.policy, Path(self.policy.resume), accumulation_steps)
        if self.board.stops_before(self.rank, batch.step):
            self.stopped = True
            return False
        self.board.post(self.rank, "step", batch.step)
        inject_fault("step", self.rank, batch.step, self.strategy.model)
        return True

    def end_step(self, batch: GlobalBatch) -> None:
        """Count the step, and save a checkpoint if one is due."""
        if self.saver and self.done == self.first:
            self.saver.prepare()
        self.done, self.epoch = batch.step + 1, batch.epoch
        self.samples += batch.size
        if self.saver and self.saver.policy.every and self.done % self.saver.policy.every == 0:
            self._save(self.saver)
        elif self.saver:
            self.saver.poll()

    def finish(self) -> None:
        """Save the final state, whether all steps are done or the launcher stopped the run."""
        if self.saver:
            if self.done > self.saved_at:
                self._save(self.saver)
            self.board.post(self.rank, "save", self.done)
            self.saver.finish()

    def _save(self, saver: Saver) -> None:
        self.board.post(self.rank, "save", self.done)
        # This raises if a loss is not finite, because such a state is not worth saving.
        self.context.probe.finish()
        saver.begin(self.done, self.samples, self.epoch)
        self.board.post(self.rank, "step", self.done)
        self.saved_at = self.done

    def _restore(
        self, policy: CheckpointPolicy, folder: Path, accumulation_steps: list[AccumulationStep]
    ) -> None:
        context, plan = self.context, self.context.plan
        uses_ddp = plan.strategy in BUCKETED or plan.zero == 1
        if uses_ddp and not plan.schedule and not plan.tensor_plan:
            # DDP rebuilds its buckets after the first backward pass. With three or more ranks, the
            # buckets determine the order of additions. For bit-identical results, run one backward
            # pass and discard its gradients, so that DDP uses the rebuilt buckets.
            self.strategy.forward_backward(accumulation_steps)
            self.optimizer.zero_grad(set_to_none=True)
            context.probe.discard()

        seed = (plan.seed + 1 + context.rank.random_stream + 1_000_003 * policy.done) % 2**32
        seed_everything(seed)
        if context.streams:
            context.streams.seed(seed)
        self.state.restore(folder, policy.same_topology)
        fields = {"folder": folder.name, "same_topology": policy.same_topology}
        context.probe.emit("resume", step=policy.done, **fields)
