"""The axes of a grid of ranks: the groups of ranks along each axis, and what they exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paralab.plan.grid import AXES, Cell, ranks_along

# What the ranks along an axis exchange, and when.
GRADIENTS = ("all_reduce",), "the gradients, once per optimizer step"
AVERAGES = ("all_reduce", "broadcast"), "the parameters, every few steps"
SHARDED: Mapping[int, tuple[tuple[str, ...], str]] = {
    1: (
        ("all_reduce", "broadcast"),
        "the gradients, and then the updated parameters, in each step",
    ),
    2: (("all_gather", "reduce_scatter"), "the parameters before, the gradients after each unit"),
    3: (("all_gather", "reduce_scatter"), "the parameters before, the gradients after each unit"),
}
IN_STAGES: Mapping[int, tuple[tuple[str, ...], str]] = {  # FSDP in the stages of a pipeline
    2: (SHARDED[2][0], "the stage's parameters and gradients, once per optimizer step"),
    3: (
        SHARDED[3][0],
        "the parameters of each unit for each micro-batch, the gradients once per optimizer step",
    ),
}
PASSED = ("send", "receive"), "activations and their gradients, for each micro-batch"
SPLIT = ("all_reduce",), "the activations and their gradients, in each split layer"
SEQUENCES = (
    ("all_to_all", "all_gather", "all_reduce"),
    "sequence parts and heads, before and after attention; then the gradients of the blocks",
)
EXPERTS = (
    ("all_to_all", "all_reduce"),
    "tokens and their experts' results, in each expert layer; then the other gradients",
)


@dataclass(frozen=True)
class Axis:
    """One axis of the grid of ranks.

    name         replicas, stages, or shards
    groups       the ranks that differ only along this axis
    collectives  the collectives that these ranks run
    exchanged    the data that they exchange, and when
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    collectives: tuple[str, ...]
    exchanged: str

    @property
    def size(self) -> int:
        return len(self.groups[0])


def describe_axes(
    cells: Sequence[Cell],
    zero: int | None,
    averages: bool = False,
    sequences: bool = False,
    stages: bool = False,
    experts: bool = False,
) -> tuple[Axis, ...]:
    """Return the axes with more than one rank. `stages` means that FSDP shards the
    stages of a pipeline."""
    replicas = EXPERTS if experts else AVERAGES if averages else GRADIENTS
    exchanges = {
        "replicas": (IN_STAGES if stages else SHARDED)[zero] if zero else replicas,
        "stages": PASSED,
        "shards": SEQUENCES if sequences else SPLIT,
    }
    axes = (Axis(name, ranks_along(name, cells), *exchanges[name]) for name in AXES)
    return tuple(axis for axis in axes if axis.size > 1)
