"""Gradients that lie in memory otherwise than the buckets they are sent in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paralab.doctor.agreement import found, listed, place_of, wraps
from paralab.doctor.events import Backward, Wrap
from paralab.doctor.finding import Finding
from paralab.doctor.layouts import in_same_order
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.registry import check


@check("S17", source="ranks")
def gradient_layout(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks if seen.world > 1 else []:
        for wrap in wraps(rank):
            passes = [
                b.laid[key]
                for b in rank.of(Backward)
                if b.laid and (key := str(wrap.model)) in b.laid
            ]
            if not passes:
                continue
            yield _finding(rank, wrap, passes[-1])
            return


def _finding(rank: RankSeen, wrap: Wrap, rows: list[list[Any]]) -> Finding:
    costly = [row for row in rows if not in_same_order(*row[1:])]
    name, shape, gradient, bucket = (costly or rows)[0]
    cost = (
        "it is rearranged in every step. The result is right"
        if costly
        else "only dimensions of size 1 differ, so the values lie in the same order, and DDP's warning of it is all that happens"
    )
    return found(
        "S17",
        "warning" if costly else "suspect",
        f"the gradient of {listed([row[0] for row in costly or rows])} is laid out otherwise than the bucket that DDP sends it in, "
        f"which has the layout of the parameter when it was wrapped here ({name}, shape {shape}: strides {gradient} against "
        f"{bucket}): {cost}",
        "model.to(memory_format=torch.channels_last) before DistributedDataParallel(…) where the data is channels_last; else "
        ".contiguous() after transpose or permute",
        place_of(wrap),
        [
            f"rank {rank.rank}: {row[0]} {row[1]}: gradient {row[2]}, bucket {row[3]}"
            for row in rows[:4]
        ],
    )
