"""Draw the grid of ranks: which rank has which cell, and what the ranks along each axis exchange.

                       stage 0          stage 1
replica 0, shard 0     rank 0, cpu:0    rank 2, cpu:2
replica 0, shard 1     rank 1, cpu:1    rank 3, cpu:3

If a process has all stages of a replica, its rank has several cells:

                       stage 0          stage 1
replica 0              rank 0, cpu:0    rank 0, cpu:2
replica 1              rank 1, cpu:1    rank 1, cpu:3
"""

from collections.abc import Sequence

from paralab.analyse.blocks import Cell, Table
from paralab.plan.axes import PASSED
from paralab.plan.plan import Plan


def grid_tables(plan: Plan) -> tuple[Table, ...]:
    """Return both tables, or none if all devices are along one axis."""
    return (_cells(plan), _axes(plan)) if len(plan.axes) + _inside(plan) > 1 else ()


def _inside(plan: Plan) -> bool:
    """Return whether the stages of a replica are in one process."""
    return plan.stages > 1 and plan.schedule is None


def _cells(plan: Plan) -> Table:
    names = {axis.name for axis in plan.axes}
    ranks: dict[str, list[str]] = {}
    for rank in plan.ranks:
        replica, _, shard = rank.cell
        words = [f"replica {replica}"] * ("replicas" in names)
        words += [f"shard {shard}"] * ("shards" in names)
        owners = [f"rank {rank.rank}, {device.name}" for device in rank.devices]
        ranks.setdefault(", ".join(words), []).extend(owners)
    columns = [f"stage {stage}" for stage in range(plan.stages)]
    columns = columns if plan.stages > 1 else ["the model"]
    return _table("Which rank has what", ("", *columns), [(row, *ranks[row]) for row in ranks])


def _axes(plan: Plan) -> Table:
    rows = [
        (
            axis.name,
            ", ".join(" ".join(map(str, group)) for group in axis.groups),
            ", ".join(name.replace("_", "-") for name in axis.collectives),
            axis.exchanged,
        )
        for axis in plan.axes
    ]
    if _inside(plan):
        rows.append(("stages", "within each rank", "copies", PASSED[1]))
    return _table("Who exchanges what", ("along the", "ranks", "with", "what and when"), rows)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(title, columns, tuple(tuple(Cell(text) for text in row) for row in rows))
