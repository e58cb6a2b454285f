"""One rank's view of a run: its plan, its workload, and tools that all strategies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paralab.plan.plan import Plan, RankPlan
from paralab.record.writer import EventWriter
from paralab.worker.measure.clock import Clock
from paralab.worker.measure.memory import ActivationMeter
from paralab.worker.measure.probes import Probe, SplitNotes, detail_interval
from paralab.worker.precision import Precision
from paralab.worker.random_streams import RandomStreams
from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sharding.shards import gathered, whole
from paralab.workload.batch import call_model, copied, tensors
from paralab.workload.fp64 import loss_in_fp64
from paralab.workload.randomness import seed_everything
from paralab.workload.recompute import MakeContext, Watched, watch_within
from paralab.workload.sample_draws import seeded_loss
from paralab.workload.workload import Workload


@dataclass
class MicroBatch:
    """Samples of one replica that pass through the model together, and their share of the global
    loss."""

    inputs: Any
    targets: Any
    share: float
    replica: int = 0


# One accumulation step processes one micro-batch, or several that fill a pipeline.
AccumulationStep = list[MicroBatch]


def with_idle_steps(steps: list[AccumulationStep], needed: int) -> list[AccumulationStep]:
    """Add steps with weight zero if a small last batch has fewer steps than `needed`. All ranks
    must run the same collectives the same number of times."""
    # The model may change inputs in place, so idle steps have their own.
    idle = [replace(micro, inputs=copied(micro.inputs), share=0.0) for micro in steps[0]]
    return [idle] * (needed - len(steps)) + steps


@dataclass
class RankContext:
    plan: Plan
    rank: RankPlan
    workload: Workload
    precision: Precision
    probe: Probe
    meter: ActivationMeter
    note_split: SplitNotes
    streams: RandomStreams | None = None  # one per virtual device, if threads draw random numbers
    shard_streams: ShardStreams | None = None  # set if shards draw random numbers
    # Makes an additional context for recomputing a block
    recomputing: Callable[[nn.Module], MakeContext] = lambda block: nullcontext
    is_recomputing: bool = False  # whether a backward pass is recomputing a block

    def drawing(self, current: Callable[[], int]) -> AbstractContextManager[None]:
        """In this context, draw random numbers from the stream of virtual device `current()`."""
        return self.streams.drawing(current) if self.streams else nullcontext()

    def watch_recomputed(self, block: nn.Module) -> Watched:
        """Count a block's activations, and recompute the block in the strategy's context."""
        watched = watch_within(self.meter.watch(block), self.recomputing(block))
        return watch_within(watched, self._note_recomputation)

    @contextmanager
    def _note_recomputation(self) -> Iterator[None]:
        self.is_recomputing = True
        try:
            yield
        finally:
            self.is_recomputing = False

    def weighted_loss(self, output: Any, micro: MicroBatch) -> torch.Tensor:
        return weighted_loss(self.workload, output, micro.targets, micro.share)


def weighted_loss(workload: Workload, output: Any, targets: Any, share: float) -> torch.Tensor:
    """Return share · loss. Summed over all micro-batches, this is the global batch's loss.

    The share is the micro-batch's weight divided by the global batch's weight. A share of zero
    means that the micro-batch has no real samples, whose mean would be NaN. Return a zero that is
    connected to the model's graph instead.
    """
    if share == 0.0:
        # An empty sum is zero even if the output contains -inf, as masked logits do.
        outputs = [t.flatten() for t in tensors(output) if t.is_floating_point()]
        return gathered(torch.stack([t[:0].sum() for t in outputs]).sum())
    return gathered(workload.loss(output, targets)) * share


def set_up_rank(
    workload: Workload, plan: Plan, rank_number: int, writer: EventWriter, origin: float
) -> tuple[RankContext, nn.Module]:
    """Build this rank's model and context. All ranks use the same seed, so their models match."""
    rank = plan.ranks[rank_number]
    devices = [device.torch for device in rank.devices]
    on_gpu = plan.device == "cuda"
    torch.set_num_threads(plan.threads_per_device)
    if on_gpu:
        torch.cuda.set_device(devices[0])

    seed_everything(plan.seed)
    precision = Precision(plan)
    model = precision.cast_model(workload.model()).train()
    if plan.precision == "fp64":
        workload = replace(workload, loss=loss_in_fp64(workload.loss))
    if "random" in plan.control:
        workload = replace(workload, loss=seeded_loss(workload.loss))

    # Each stage records marks for each micro-batch, and each mark delays GPU kernel launches.
    many_marks = on_gpu and len(plan.stage_parts) > 1 and not plan.schedule
    clock = Clock(origin, devices if on_gpu else ())
    probe = Probe(clock, writer, detail_interval(plan.num_steps) if many_marks else 1)
    context = RankContext(
        plan,
        rank,
        workload,
        precision,
        probe,
        ActivationMeter(model.parameters(), enabled=plan.device == "cpu"),
        SplitNotes([device.name for device in rank.devices], probe),
        _make_streams(plan, rank_number),
    )
    return context, model


def _make_streams(plan: Plan, rank_number: int) -> RandomStreams | None:
    """Create random streams if multiple virtual devices or replicas share a generator."""
    names = [device.torch for device in plan.ranks[rank_number].devices]
    threaded = plan.strategy == "dp" or (plan.device == "cpu" and plan.micro_batches > 1)
    shared = len(set(names)) < len(names)
    if not plan.draws or not threaded or not shared:
        return None
    return RandomStreams(len(names), plan.seed + 1 + rank_number, torch.device(names[0]).index)


class Strategy(ABC):
    """How one rank trains. `model` is the user's module, whose parameters the optimizer updates."""

    context: RankContext
    model: nn.Module

    @abstractmethod
    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        """Compute the global gradients, and return this rank's part of the loss."""

    def accumulate(
        self,
        model: Callable[..., Any],
        accumulation_steps: list[AccumulationStep],
        unsynchronized: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> torch.Tensor:
        """Accumulate the gradients of all steps. All but the last run in `unsynchronized()`."""
        context, device = self.context, self.context.rank.devices[0].name
        losses = []
        for number, [micro] in enumerate(accumulation_steps):
            last = number == len(accumulation_steps) - 1
            with nullcontext() if last else unsynchronized():
                with context.probe.span("forward", device=device, accumulation=number):
                    with context.precision.autocast(), context.meter.counting(device):
                        output = call_model(model, micro.inputs)
                        loss = context.weighted_loss(output, micro)
                with context.probe.span("backward", device=device, accumulation=number):
                    context.precision.backward(loss)
            context.meter.backward_done()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def stepping(self) -> AbstractContextManager[None]:
        """Return a context for the optimizer step."""
        return nullcontext()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the global batch's gradients. All ranks must call this."""
        return {name: p.grad for name, p in self.model.named_parameters() if not p.is_meta}

    def finish_step(self, step: int) -> None:  # noqa: B027  most strategies do nothing
        """Run any work that remains after the optimizer step."""

    def own_state(self) -> dict[str, Any]:
        """Return this rank's checkpoint state other than the model and optimizer."""
        return {}

    def restore_own(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore the state from `own_state`."""

    def device_parameters(self, device: str) -> list[nn.Parameter]:
        """Return the parameters on this device."""
        return list(self.model.parameters())

    def transient_bytes(self) -> dict[str, int]:
        """Return the bytes, by kind, that the strategy needs only during part of a step."""
        return {}

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the full model's state. All ranks must call this, because they may have shards."""
        return {name: whole(value) for name, value in self.model.state_dict().items()}
