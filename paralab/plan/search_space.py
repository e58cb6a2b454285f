"""What `tune` searches: the ways to use a number of devices, and the values of options. These are
pure functions on plain numbers.

A layout is a strategy with a number on each axis of its device grid. With 8 devices:

    dp, ddp, fsdp    ×8
    tp, cp, ep       8 shards
    mp, pipeline     8 stages
    hybrid           ×4 · 2 stages                ×2 · 4 stages
                     ×4 · 1 stage · 2 shards      ×2 · 1 stage · 4 shards
                     ×1 · 4 stages · 2 shards     ×1 · 2 stages · 4 shards
                     ×2 · 2 stages · 2 shards
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from paralab.plan.option import options_of
from paralab.plan.plan import label
from paralab.plan.request import APPLIES, STRATEGIES, Options, Request
from paralab.plan.schedules import SCHEDULES, misfit
from paralab.workload.summary import Summary

# Options in the order in which `tune` tries them. The page plots the first one as a curve.
TUNED = (
    *("bucket_mb", "accumulate", "micro_batches", "batch_size"),
    *("zero", "shard_groups", "schedule", "sequence_parallel", "recompute", "compile"),
    *("bucket_view", "static_graph", "precision"),
)
# These change what each rank has, so each value is a separate layout.
DIVIDING = ("zero", "schedule")
# Changes to try, in this order, until a layout fits in memory. Accumulation comes first because it
# recomputes nothing.
SAVERS: tuple[Options, ...] = (
    {"accumulate": 2},
    {"accumulate": 4},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "accumulate": 4},
    {"recompute": "full", "accumulate": 16},
)


def splits(devices: int, axes: int) -> list[tuple[int, ...]]:
    """Return the ways to arrange devices along axes. With multiple axes, use at least two, because
    a single axis is another strategy's layout.

        8 devices, 1 axis     8
        8 devices, 2 axes     2 × 4    4 × 2
        8 devices, 3 axes     1 × 2 × 4    1 × 4 × 2    2 × 1 × 4    2 × 2 × 2    2 × 4 × 1    …
    """
    ways: list[tuple[int, ...]] = [()]
    for _ in range(axes):
        ways = [(*way, n) for way in ways for n in range(1, devices + 1)]
        ways = [way for way in ways if devices % prod(way) == 0]
    used = min(2, axes)
    return [way for way in ways if prod(way) == devices and sum(n > 1 for n in way) >= used]


def layouts(devices: int, strategies: Iterable[str]) -> list[Options]:
    """Return every way to use all devices, with the usual values of the other options."""
    ways: list[Options] = []
    for name in strategies:
        axes = [each.name for each in options_of(Request) if each.axis and name in each.strategies]
        for numbers in splits(devices, len(axes)):
            ways.append({"strategy": name, **dict(zip(axes, numbers, strict=True))})
    return ways


def divided(layout: Request) -> list[Request]:
    """Return the layout, and its variants with other ways to divide the work: ZeRO stages and
    pipeline schedules."""
    by_label = {label(layout): layout}
    for each in options_of(Request):
        free = each.name in DIVIDING and getattr(layout, each.name) is None
        for choice in each.choices if free and each.applies_to(layout.strategy) else ():
            other: Options = {each.name: choice}
            request = replace(layout, **other)
            by_label.setdefault(label(request), request)
    return list(by_label.values())


def changes(
    base: Request, summary: Summary, on_gpu: bool, any_batch: bool = False
) -> list[Request]:
    """Return variants of the configuration, each with one value of an option that was not given.
    Change the batch size only with `any_batch`, because that changes the training."""
    batch = base.batch_size or summary.batch_size
    replicas, stages = base.replicas or 2, base.stages or 2
    mebi, per_replica = summary.parameter_bytes / 2**20, batch // (base.replicas or 1)
    modes = {mode for block in summary.blocks for mode in block.recomputes}
    values: dict[str, Sequence[Any]] = {
        "bucket_mb": [round(mebi / n, 2) for n in (1, 2, 4, 8, 16, 32) if mebi / n >= 0.05],
        "accumulate": [n for n in (2, 4) if batch // replicas >= n],
        "micro_batches": [
            n
            for n in (2, 4, 8, 16)
            if per_replica >= n and not (base.schedule and misfit(base.schedule, stages, n))
        ],
        "batch_size": [n for n in (2 * batch, 4 * batch, 8 * batch) if n <= (summary.samples or n)],
        "zero": (1, 2, 3),
        "shard_groups": [n for n in range(2, replicas // 2 + 1) if replicas % n == 0],
        "schedule": SCHEDULES,
        "sequence_parallel": [True] if summary.blocks else [],
        "recompute": [mode for mode in ("selective", "full") if mode in modes],
        "compile": [True] if summary.blocks else [],
        # With a schedule, gradients are summed without DDP.
        "bucket_view": [] if base.schedule else [True],
        "static_graph": [True] if (base.accumulate or 1) == 1 else [],
        "precision": ["tf32", "bf16", "fp16"] if on_gpu else ["bf16"],
    }
    variants = []
    for name in TUNED:
        free = any_batch if name == "batch_size" else getattr(base, name) is None
        for value in (
            values[name] if free and base.strategy in APPLIES.get(name, STRATEGIES) else ()
        ):
            request = replace(base, **{name: value})
            if name == "batch_size" or label(request) != label(base):
                variants.append(request)
    return variants
