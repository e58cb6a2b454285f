"""Cut a model's layers into stages so that the slowest stage is as fast as possible.

seconds   3 1 1 1 2      over 2 stages
          [3 1] [1 1 2]  slowest 4          not [3 1 1] [1 2] (5), which splits by layer count

Timings are noisy, so cuts that depend only on timings would change from run to run. We balance
operation and byte counts instead, unless the timings show that another cut is clearly better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from paralab.errors import UsageError
from paralab.plan.batches import Span, widest
from paralab.plan.plan import Plan, Reasons, Stage
from paralab.plan.request import STAGED, Request
from paralab.plan.schedules import Action, order
from paralab.plan.stage_groups import part_of
from paralab.units import plural, seconds, size
from paralab.workload.summary import Layer, Summary

CLEARLY = 0.8  # another cut is clearly better if its slowest stage takes less than this fraction
# Rough rates for a CPU core. Only their ratio matters: it sets the cost of layers that mostly move
# data (embeddings, norms).
FLOPS_PER_SECOND, BYTES_PER_SECOND = 50e9, 5e9


def balance(layers: Sequence[Layer], stages: int, samples: int) -> tuple[list[Span], str]:
    """Return the layer numbers at which each stage starts and stops, and what the cut balances."""
    measured = [layer.seconds for layer in layers]
    by_time = split_by_time(measured, stages)
    if any(layer.flops is None or layer.activation_bytes_per_sample is None for layer in layers):
        return by_time, "measured time"
    by_count = split_by_time([_count_seconds(layer, samples) for layer in layers], stages)
    if slowest(by_time, measured) < CLEARLY * slowest(by_count, measured):
        return by_time, "measured time"
    return by_count, "operations and bytes"


def _count_seconds(layer: Layer, samples: int) -> float:
    """Estimate a layer's time from its operations, and from the bytes that three passes move."""
    moved = (layer.activation_bytes_per_sample or 0.0) * samples + layer.parameter_bytes
    return (layer.flops or 0.0) / FLOPS_PER_SECOND + 3 * moved / BYTES_PER_SECOND


def slowest(parts: list[Span], costs: Sequence[float]) -> float:
    return max(sum(costs[first:stop]) for first, stop in parts)


def split_by_time(costs: Sequence[float], stages: int) -> list[Span]:
    """Return where each stage starts and stops. Each stage gets at least one layer."""
    assert 1 <= stages <= len(costs)
    total = list(accumulate(costs, initial=0.0))

    @cache
    def best(first: int, stages_left: int) -> tuple[float, int]:
        """Split the layers from `first` on. Return the slowest stage's time, and the end of the
        first stage."""
        if stages_left == 1:
            return total[-1] - total[first], len(costs)
        stops = range(first + 1, len(costs) - stages_left + 2)
        return min(
            (max(total[stop] - total[first], best(stop, stages_left - 1)[0]), stop)
            for stop in stops
        )

    parts, first = [], 0
    for stages_left in range(stages, 0, -1):
        stop = best(first, stages_left)[1]
        parts.append((first, stop))
        first = stop
    return parts


def cut_into_stages(
    request: Request,
    stages: int,
    chunks: int,
    summary: Summary,
    cuts: Sequence[str],
    reasons: Reasons,
) -> tuple[Stage, ...]:
    """Return the model parts, with `chunks` parts per stage. Return no parts if the strategy does
    not split the model.

    A resumed run uses its checkpoint's `cuts`, so that its random numbers match.
    """
    if request.strategy not in STAGED:
        return ()
    _require_enough_layers(request, stages, chunks, summary)

    layers = summary.layers
    names = [layer.name for layer in layers]
    if len(cuts) == stages * chunks and set(cuts) <= set(names):
        starts = [names.index(cut) for cut in cuts]
        spans, basis = list(pairwise([*starts, len(layers)])), "as in the checkpoint"
    else:
        spans, measure = balance(layers, stages * chunks, summary.batch_size)
        basis = f"balanced by {measure}"

    parts = [_combine(layers[first:stop]) for first, stop in spans]
    total = sum(part.seconds for part in parts)
    for number, part in enumerate(parts):
        reasons.add(
            f"stage {number}" if chunks == 1 else f"part {number}, on stage {number % stages}",
            f"{plural(part.layers, 'layer')} from {part.start or 'the input'!r}, "
            f"{size(part.parameter_bytes)} of parameters",
            f"{basis}; {seconds(part.seconds)} of {seconds(total)} measured for all layers"
            if total
            else basis,
        )
    return tuple(parts)


def _require_enough_layers(request: Request, stages: int, chunks: int, summary: Summary) -> None:
    """Require `chunks` parts per stage, with at least one layer each."""
    layers = len(summary.layers)
    cut = f"can be cut into at most {layers} parts" if layers > 1 else "cannot be cut into parts"
    most = f"{summary.name} {cut}"
    most += f", because {summary.uncut_reason}." if summary.uncut_reason else "."
    if layers < stages:
        raise UsageError(
            f"--stages {stages}: {most}",
            fix=f"--stages {layers} or fewer"
            if layers > 1
            else "a strategy that does not split the model: single, dp, ddp, fsdp",
        )
    if layers < stages * chunks:
        fewer = layers // chunks
        raise UsageError(
            f"--schedule {request.schedule} needs {chunks} model parts per stage: "
            f"{stages} stages × {chunks} = {stages * chunks}, but {most}",
            fix="--schedule 1f1b" + (f", or --stages {fewer}" if fewer > 1 else ""),
        )


def _combine(layers: Sequence[Layer]) -> Stage:
    activations = [layer.activation_bytes_per_sample for layer in layers]
    known = [each for each in activations if each is not None]
    return Stage(
        start=layers[0].name,
        modules=tuple(name for layer in layers for name in layer.modules),
        layers=len(layers),
        seconds=sum(layer.seconds for layer in layers),
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        activation_bytes_per_sample=sum(known) if len(known) == len(layers) else None,
    )


@dataclass(frozen=True)
class StageLoad:
    """The expected memory and time of one stage, in fp32.

    seconds              forward and backward time for the measured samples on one device
    micro_batches_kept   the largest number of micro-batches with activations in memory
    """

    stage: int
    layers: int
    seconds: float
    share: float
    parameters: int
    gradients: int
    optimizer: float | None
    activations: float | None
    micro_batches_kept: int


def stage_loads(plan: Plan) -> list[StageLoad]:
    """Estimate each stage's time and memory.

    A stage stores a micro-batch's activations between its forward and backward pass. With gpipe and
    4 micro-batches, each stage stores 4 micro-batches at a time. With 1f1b and 3 stages, the stages
    store 3, 2, and 1.
    """
    if not plan.stage_parts:
        return []
    total_seconds = sum(part.seconds for part in plan.stage_parts)
    orders = order(plan.schedule or "gpipe", plan.stages, plan.micro_batches)

    loads = []
    for stage, actions in enumerate(orders):
        mine = plan.stage_parts[stage :: plan.stages]
        stage_seconds = sum(part.seconds for part in mine)
        parameters = sum(part.parameter_bytes for part in mine)
        if plan.tensor_plan:
            parameters -= _bytes_of_other_shards(plan, stage)
        per_byte = plan.optimizer_bytes_per_byte
        kept, activations = _kept_at_once(plan, mine, actions)
        loads.append(
            StageLoad(
                stage=stage,
                layers=sum(part.layers for part in mine),
                seconds=stage_seconds,
                share=stage_seconds / total_seconds if total_seconds else 0.0,
                parameters=parameters,
                gradients=parameters,
                optimizer=None if per_byte is None else parameters * per_byte,
                activations=activations,
                micro_batches_kept=kept,
            )
        )
    return loads


def _bytes_of_other_shards(plan: Plan, stage: int) -> int:
    """Return the bytes of this stage's split layers that are on other shards, in fp32."""
    groups = plan.tensor_plan.kept if plan.tensor_plan else ()
    here = [group for group in groups if part_of(group, plan.stage_parts) % plan.stages == stage]
    return sum(4 * group.weights * (plan.shards - 1) // plan.shards for group in here)


def _kept_at_once(
    plan: Plan, mine: Sequence[Stage], actions: Sequence[Action]
) -> tuple[int, float | None]:
    """Return the largest numbers of micro-batches and activation bytes that a stage stores at
    once."""
    samples = widest(plan.ranks[0].samples_per_step, plan.accumulate, plan.micro_batches)

    def bytes_of(part: int) -> float:
        return (mine[part // plan.stages].activation_bytes_per_sample or 0.0) * samples

    most, most_bytes = most_kept(actions, bytes_of)
    is_known = not plan.tensor_plan and all(
        part.activation_bytes_per_sample is not None for part in mine
    )
    return most, most_bytes if is_known else None


def most_kept(actions: Sequence[Action], bytes_of: Callable[[int], float]) -> tuple[int, float]:
    """Return the largest numbers of micro-batches and bytes stored at once. A forward pass of a
    part stores `bytes_of(part)` bytes, and its backward pass frees them."""
    live, most, live_bytes, most_bytes = 0, 0, 0.0, 0.0
    for part, kind, _ in actions:
        change = 1 if kind == "F" else -1 if kind in "BW" else 0
        live, live_bytes = live + change, live_bytes + change * bytes_of(part)
        most, most_bytes = max(most, live), max(most_bytes, live_bytes)
    return most, most_bytes
