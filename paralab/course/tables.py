"""The tables of a sheet: a row per configuration, device, rank, or bucket.

COLUMNS lists what a template may ask for. A cell carries its number and spread, by which a
student's cell is graded. On a blank sheet (`lab` is None) all cells but the first are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Cell, Table
from paralab.analyse.confidence import Ratio
from paralab.analyse.phrases import factor, listed, share
from paralab.analyse.report import facts
from paralab.course.configurations import LABELS
from paralab.course.measurements import Measured, Measurements, sharing
from paralab.course.measures import (
    arrived,
    bubble,
    busy_shares,
    ceil_div,
    change,
    copying,
    gradients,
    interval,
    memory,
    micro_sizes,
    zero_share,
)

Column = Callable[[Measurements, Measured, str], Cell]  # the string is the base configuration's key


def _activations(row: Measured) -> float | None:
    return max((e.activations for e in row.peak_bytes if e.activations), default=None)


COLUMNS: Mapping[str, Column] = {
    "processes": lambda lab, row, base: cells.exact(row.processes),
    "devices": lambda lab, row, base: cells.exact(row.devices),
    "devices of rank 0": lambda lab, row, base: cells.name(
        listed(list(dict.fromkeys(row.ranks[0].devices)))
    ),
    "world size": lambda lab, row, base: cells.exact(len(row.ranks)),
    "batch": lambda lab, row, base: cells.exact(row.batch.size),
    "batch // world size": lambda lab, row, base: cells.exact(row.batch.size // len(row.ranks)),
    "dropped by //": lambda lab, row, base: cells.exact(row.batch.size % len(row.ranks)),
    "split": lambda lab, row, base: cells.split(arrived(row)),
    "data split": lambda lab, row, base: cells.split(arrived(row)),
    "samples per rank": lambda lab, row, base: cells.exact(row.ranks[0].samples_per_step),
    "samples per pass": lambda lab, row, base: cells.exact(arrived(row)[0]),
    "samples per micro-batch": lambda lab, row, base: cells.name(micro_sizes(row)),
    "micro-batches": lambda lab, row, base: cells.exact(row.observed.passes.micro_batches),
    "forward passes": lambda lab, row, base: cells.exact(row.observed.passes.forward),
    "backward passes": lambda lab, row, base: cells.exact(row.observed.passes.backward),
    "optimizer steps": lambda lab, row, base: cells.exact(row.observed.optimizer_steps),
    "step time": lambda lab, row, base: cells.step_time(row),
    "total time": lambda lab, row, base: cells.duration(row.total_seconds),
    "samples per second": lambda lab, row, base: cells.per_second(row.samples_per_second),
    "samples per second per device": lambda lab, row, base: cells.per_second(
        row.samples_per_second_per_device
    ),
    "speed-up": lambda lab, row, base: _speed_cell(lab.speed_up(base, row.key), row.key == base),
    "efficiency": lambda lab, row, base: (
        cells.missing(sharing(row))
        if sharing(row)
        else cells.measured_share(lab.speed_up(base, row.key).value / row.devices)
    ),
    "memory": lambda lab, row, base: cells.held_bytes(memory(row)),
    "change of memory": lambda lab, row, base: cells.words(
        change(memory(lab.rows[base]), memory(row))
    ),
    "activations": lambda lab, row, base: cells.held_bytes(
        _activations(row), "only the allocator's peak is known"
    ),
    "busy share": lambda lab, row, base: _shares(busy_shares(row)),
    "communication": lambda lab, row, base: cells.duration(row.metrics.communication_seconds),
    "exposed communication": lambda lab, row, base: cells.duration(
        row.metrics.exposed_communication_seconds
    ),
    "hidden share": lambda lab, row, base: cells.measured_share(row.metrics.overlap),
    "all-reduces": lambda lab, row, base: cells.exact(row.all_reduces_per_step),
    "data per step": lambda lab, row, base: cells.held_bytes(row.bytes_per_step),
    "bubble": lambda lab, row, base: cells.measured_share(bubble(row), "there is no pipeline"),
    "ideal bubble": lambda lab, row, base: _ideal(row),
    "equal to single": lambda lab, row, base: cells.yes_no(
        row.verify.equal if row.verify else None
    ),
    "loss difference": lambda lab, row, base: cells.measured_share(
        row.loss_difference, "a loss is not finite"
    ),
    "skipped steps": lambda lab, row, base: cells.exact(row.skipped_steps),
    "loss scale": lambda lab, row, base: (
        cells.exact(gradients(row).scale) if gradients(row).scale else cells.name("none")
    ),
    "gradients": lambda lab, row, base: cells.exact(gradients(row).total),
    "zero gradients": lambda lab, row, base: cells.exact(gradients(row).zeros),
    "share of zeros": lambda lab, row, base: cells.measured_share(zero_share(row)),
}


def _ideal(row: Measured) -> Cell:
    found = row.metrics.bubble
    return Cell(share(found.ideal), found.ideal) if found else cells.missing("there is no pipeline")


def _speed_cell(speed: Ratio, is_base: bool) -> Cell:
    if is_base:
        return cells.exact(1)
    low, high = (speed.value if end is None else end for end in (speed.low, speed.high))
    return Cell(f"{factor(speed.value)}× ({interval(speed)})", speed.value, low, high)


def _shares(values: Sequence[float]) -> Cell:
    if not values:
        return cells.missing("the replicas run inside one call")
    return Cell(
        listed([share(v) for v in values]), sum(values) / len(values), min(values), max(values)
    )


def _cells(lab: Measurements, key: str, columns: Sequence[str], base: str) -> tuple[Cell, ...]:
    if key not in lab.rows:
        first = cells.missing(lab.why_not(key))
        return (first, *(cells.missing("see left") for _ in columns[1:]))
    return tuple(COLUMNS[column](lab, lab.rows[key], base) for column in columns)


EMPTY = Cell(" ")


def table(
    lab: Measurements | None,
    title: str,
    keys: Sequence[str],
    columns: Sequence[str],
    base: str = "",
) -> Table:
    """Create a table with a row per configuration."""
    rows = []
    for key in keys:
        filled = _cells(lab, key, columns, base or keys[0]) if lab else [EMPTY] * len(columns)
        rows.append((cells.name(LABELS[key]), *filled))
    return Table(title, ("configuration", *columns), tuple(rows), lab.notes(keys) if lab else "")


def facing_table(
    lab: Measurements | None,
    title: str,
    keys: Sequence[str],
    measures: Sequence[str],
    base: str = "",
    goals: Sequence[str] = (),
) -> Table:
    """Create a table with a column per configuration."""
    if lab and not any(key in lab.rows for key in keys):
        return Table(title, (), ())
    rows = []
    for measure in measures:
        line: list[Cell] = []
        for place, key in enumerate(keys):
            if lab is None:
                line.append(EMPTY)
            elif measure == "goal":
                line.append(cells.words(goals[place]))
            else:
                line.append(_cells(lab, key, [measure], base)[0])
        rows.append((cells.name(measure), *line))
    return Table(title, ("", *(LABELS[key] for key in keys)), tuple(rows))


def split_table(lab: Measurements | None, title: str, keys: Sequence[str]) -> Table:
    columns = ("devices", "batch", "batch ÷ devices, rounded up", "split", "equal")
    rows = []
    for key in keys:
        devices = cells.name(key.removeprefix("dp"))
        if lab is None:
            rows.append((devices, *[EMPTY] * 4))
            continue
        row = lab.rows[key]
        sizes = arrived(row)
        chunk = ceil_div(row.batch.size, row.devices)
        rows.append(
            (
                devices,
                cells.exact(row.batch.size),
                cells.exact(chunk),
                cells.split(sizes),
                cells.yes_no(len(set(sizes)) == 1),
            )
        )
    return Table(title, columns, tuple(rows))


RANK_COLUMNS: Mapping[str, Callable[[Measured, Any], Cell]] = {
    "local rank": lambda row, rank: cells.exact(rank.local_rank),
    "world size": lambda row, rank: cells.exact(len(row.ranks)),
    "process": lambda row, rank: cells.words(rank.pid),
    "device": lambda row, rank: cells.name(listed(rank.devices)),
    "stage devices": lambda row, rank: cells.name(listed(rank.devices)),
    "samples": lambda row, rank: cells.exact(rank.samples_per_step),
    "micro-batches": lambda row, rank: cells.exact(row.batch.micro_batches),
    "samples per micro-batch": lambda row, rank: cells.name(micro_sizes(row)),
}


def rank_table(lab: Measurements | None, title: str, key: str, columns: Sequence[str]) -> Table:
    if lab is None:
        lines = [(cells.name(str(rank)), *[EMPTY] * len(columns)) for rank in range(2)]
        return Table(title, ("rank", *columns), tuple(lines))
    row = lab.rows[key]
    lines = [
        (cells.name(str(rank.rank)), *(RANK_COLUMNS[name](row, rank) for name in columns))
        for rank in row.ranks
    ]
    return Table(title, ("rank", *columns), tuple(lines), lab.notes([key]))


def device_table(
    lab: Measurements | None, title: str, keys: Sequence[str], columns: Sequence[str]
) -> Table:
    """Create a table with a row per device. It has a GPU load column only if NVML measured it."""
    if lab is None:
        lines = [
            (cells.name(f"{LABELS[key]}: device {number}"), *[EMPTY] * len(columns))
            for key in keys
            for number in range(2)
        ]
        return Table(title, ("device", *columns), tuple(lines))
    loads = any(lab.rows[key].metrics.load.gpu for key in keys)
    kept = [name for name in columns if name != "GPU load" or loads]
    lines = [
        (cells.name(f"{LABELS[key]}: {entry.device}"), *_device(lab.rows[key], place, kept))
        for key in keys
        for place, entry in enumerate(lab.rows[key].peak_bytes)
    ]
    return Table(title, ("device", *kept), tuple(lines), lab.notes(keys))


def _device(row: Measured, place: int, columns: Sequence[str]) -> list[Cell]:
    busy = [] if row.strategy == "dp" and row.metrics.balance is None else row.metrics.busy
    load = {entry.device: entry.utilization for entry in row.metrics.load.gpu}
    entry = row.peak_bytes[place]
    made: dict[str, Callable[[], Cell]] = {
        "samples": lambda: cells.exact(arrived(row)[place] if place < len(arrived(row)) else None),
        "memory": lambda: cells.held_bytes(entry.bytes),
        "busy share": lambda: cells.measured_share(
            busy[place].share if place < len(busy) else None, "the replicas run inside one call"
        ),
        "GPU load": lambda: cells.measured_share(load.get(entry.device), "NVML does not report it"),
    }
    return [made[name]() for name in columns]


def bucket_table(lab: Measurements | None, title: str, key: str) -> Table:
    columns = ("all-reduce", "data", "starts after this share of backward()", "transfer")
    if lab is None:
        return Table(title, columns, ((cells.name("0"), *[EMPTY] * 3),))
    row = lab.rows[key]
    pairs = zip(row.observed.buckets, row.metrics.buckets, strict=False)
    lines = [
        (
            cells.name(str(number)),
            cells.held_bytes(seen.bytes),
            cells.measured_share(seen.share_of_backward),
            cells.duration(timed.transfer_seconds),
        )
        for number, (seen, timed) in enumerate(pairs)
    ]
    return Table(title, columns, tuple(lines), "Rank 0, last step.")


COPYING = {
    "replicate": "copies the model to each device",
    "scatter": "splits the input",
    "gather": "collects the outputs on device 0",
    "reduce": "adds up the gradients on device 0",
}


def copying_table(lab: Measurements | None, title: str, keys: Sequence[str]) -> Table:
    known = [key for key in keys if lab is None or key in lab.rows]
    lines = []
    for kind, words in COPYING.items():
        times = [
            cells.duration(copying(lab.rows[key], kind), "nn.DataParallel does it inside its calls")
            if lab
            else EMPTY
            for key in known
        ]
        lines.append((cells.name(f"{kind}: {words}"), *times))
    return Table(title, ("call", *(LABELS[key] for key in known)), tuple(lines))


FACTS = ("machine", "memory", "versions", "workload", "data", "command")


def facts_table(lab: Measurements | None, title: str) -> Table:
    """Return the handbook's verification checkpoint: what the run depends on."""
    known = facts(lab.comparison) if lab else [(name, " ") for name in FACTS]
    lines = tuple((cells.name(name), cells.words(text)) for name, text in known)
    return Table(title, ("fact", "value"), lines)


TABLES: Mapping[str, Callable[..., Table]] = {
    "table": table,
    "facing_table": facing_table,
    "split_table": split_table,
    "rank_table": rank_table,
    "device_table": device_table,
    "bucket_table": bucket_table,
    "copying_table": copying_table,
    "facts_table": facts_table,
}
