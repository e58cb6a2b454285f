"""Layers onto stages: contiguous parts whose slowest one is as fast as possible.

seconds   3 1 1 1 2      over 2 stages
          [3 1] [1 1 2]  slowest 4          not [3 1 1] [1 2] (5), and not by count

Timings are noisy. If they alone decided, the same command would cut the model differently from run
to run. So we balance by counted operations and bytes, unless the timings say that another cut is
clearly better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from paralab.plan.batches import widest
from paralab.plan.plan import Plan
from paralab.plan.schedules import order
from paralab.workload.summary import Layer

CLEARLY = 0.8  # of the slowest stage's time, or less
# Rough rates of a CPU core. Only their ratio matters, for layers that move data but multiply
# nothing (embeddings, norms).
FLOPS_PER_SECOND, BYTES_PER_SECOND = 50e9, 5e9


def balance(
    layers: Sequence[Layer], stages: int, samples: int
) -> tuple[list[tuple[int, int]], str]:
    """((first, stop) layer of each stage, what they are balanced by)."""
    seconds = [layer.seconds for layer in layers]
    by_time = split_by_time(seconds, stages)
    if any(layer.flops is None or layer.activation_bytes_per_sample is None for layer in layers):
        return by_time, "measured time"
    counted = [
        (layer.flops or 0.0) / FLOPS_PER_SECOND
        + 3
        * ((layer.activation_bytes_per_sample or 0.0) * samples + layer.parameter_bytes)
        / BYTES_PER_SECOND
        for layer in layers
    ]
    by_count = split_by_time(counted, stages)
    if slowest(by_time, seconds) < CLEARLY * slowest(by_count, seconds):
        return by_time, "measured time"
    return by_count, "operations and bytes"


def slowest(parts: list[tuple[int, int]], seconds: Sequence[float]) -> float:
    return max(sum(seconds[first:stop]) for first, stop in parts)


def split_by_time(seconds: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """(first, stop) layer of each stage. Every stage gets at least one layer."""
    assert 1 <= stages <= len(seconds)
    total = [0.0]
    for value in seconds:
        total.append(total[-1] + value)

    @cache
    def best(first: int, stages_left: int) -> tuple[float, int]:
        """(slowest stage, where this stage stops) for layers first … end over stages_left
        stages."""
        if stages_left == 1:
            return total[-1] - total[first], len(seconds)
        stops = range(first + 1, len(seconds) - stages_left + 2)
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


@dataclass(frozen=True)
class StageLoad:
    """What one stage will hold and take, as far as it is known beforehand (fp32).

    seconds       forward and backward of the samples that were measured, on one device
    micro_batches_kept   whose activations are kept at the same time, at most
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
    """Time and memory per stage. Activations are those of the micro-batches between their forward
    and their backward pass:

    gpipe 4 of 4 on every stage; 1f1b with 3 stages 3, 2 and 1
    """
    if not plan.stage_parts:
        return []
    samples = widest(plan.ranks[0].samples_per_step, plan.accumulate, plan.micro_batches)
    whole = sum(part.seconds for part in plan.stage_parts)
    found = []
    for stage, actions in enumerate(
        order(plan.schedule or "gpipe", plan.stages, plan.micro_batches)
    ):
        mine = list(plan.stage_parts[stage :: plan.stages])
        kept = [
            plan.stage_parts[part].activation_bytes_per_sample
            for part in range(stage, len(plan.stage_parts), plan.stages)
        ]
        live, most, held, most_bytes = 0, 0, 0.0, 0.0
        for part, kind, _ in actions:
            step = 1 if kind == "F" else -1 if kind in "BW" else 0
            live, held = live + step, held + step * (kept[part // plan.stages] or 0.0) * samples
            most, most_bytes = max(most, live), max(most_bytes, held)
        parameters, seconds = (
            sum(part.parameter_bytes for part in mine),
            sum(part.seconds for part in mine),
        )
        state = (
            None
            if plan.optimizer_bytes_per_byte is None
            else parameters * plan.optimizer_bytes_per_byte
        )
        known = None if None in kept else most_bytes
        time = seconds, seconds / whole if whole else 0.0
        found.append(
            StageLoad(
                stage,
                sum(part.layers for part in mine),
                *time,
                parameters,
                parameters,
                state,
                known,
                most,
            )
        )
    return found
