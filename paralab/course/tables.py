"""The tables in a sheet, with a row for each configuration, device, rank, or bucket.

COLUMNS lists the columns that a template can use. A cell contains its number and spread, which are
used to grade a student's cell. On a blank sheet (`lab` is None), all cells but the first are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Cell, Table
from paralab.analyse.compare import Comparison
from paralab.analyse.confidence import Ratio
from paralab.analyse.phrases import factor, listed, machine_words, share
from paralab.course.configurations import KEYS, LABELS
from paralab.course.measurements import (
    Measured,
    Measurements,
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
    sharing,
    zero_share,
)

PIPELINE = "there is no pipeline"


def _activations(row: Measured) -> float | None:
    return max((e.activations for e in row.peak_bytes if e.activations), default=None)


def _loss_scale(row: Measured) -> Cell:
    scale = gradients(row).scale
    return cells.exact(scale) if scale else cells.name("none")


COLUMNS: Mapping[str, Callable[[Measured], Cell]] = {
    "processes": lambda row: cells.exact(row.processes),
    "devices": lambda row: cells.exact(row.devices),
    "devices of rank 0": lambda row: cells.name(listed(list(dict.fromkeys(row.ranks[0].devices)))),
    "world size": lambda row: cells.exact(len(row.ranks)),
    "batch": lambda row: cells.exact(row.batch.size),
    "batch // world size": lambda row: cells.exact(row.batch.size // len(row.ranks)),
    "dropped by //": lambda row: cells.exact(row.batch.size % len(row.ranks)),
    "split": lambda row: cells.split(arrived(row)),
    "batch ÷ devices, rounded up": lambda row: cells.exact(ceil_div(row.batch.size, row.devices)),
    "equal": lambda row: cells.yes_no(len(set(arrived(row))) == 1),
    "samples per rank": lambda row: cells.exact(row.ranks[0].samples_per_step),
    "samples per pass": lambda row: cells.exact(arrived(row)[0]),
    "samples per micro-batch": lambda row: cells.name(micro_sizes(row)),
    "micro-batches": lambda row: cells.exact(row.observed.passes.micro_batches),
    "forward passes": lambda row: cells.exact(row.observed.passes.forward),
    "backward passes": lambda row: cells.exact(row.observed.passes.backward),
    "optimizer steps": lambda row: cells.exact(row.observed.optimizer_steps),
    "step time": cells.step_time,
    "total time": lambda row: cells.duration(row.total_seconds),
    "samples per second": lambda row: cells.per_second(row.samples_per_second),
    "per device": lambda row: cells.per_second(row.samples_per_second_per_device),
    "memory": lambda row: cells.held_bytes(memory(row)),
    "activations": lambda row: cells.held_bytes(_activations(row), "only the peak is known"),
    "busy share": lambda row: _shares(busy_shares(row)),
    "communication": lambda row: cells.duration(row.metrics.communication_seconds),
    "exposed": lambda row: cells.duration(row.metrics.exposed_communication_seconds),
    "hidden share": lambda row: cells.measured_share(row.metrics.overlap),
    "all-reduces": lambda row: cells.exact(row.all_reduces_per_step),
    "all-reduces per pass": lambda row: cells.exact(
        row.all_reduces_per_step / row.observed.passes.backward
    ),
    "data per step": lambda row: cells.held_bytes(row.bytes_per_step),
    "bubble": lambda row: cells.measured_share(bubble(row), PIPELINE),
    "ideal bubble": lambda row: _ideal(row),
    "equal to single": lambda row: cells.yes_no(row.verify.equal if row.verify else None),
    "loss difference": lambda row: cells.measured_share(row.loss_difference, "it is not finite"),
    "skipped steps": lambda row: cells.exact(row.skipped_steps),
    "loss scale": _loss_scale,
    "gradients": lambda row: cells.exact(gradients(row).total),
    "zero gradients": lambda row: cells.exact(gradients(row).zeros),
    "share of zeros": lambda row: cells.measured_share(zero_share(row)),
}


def _compared(column: str, lab: Measurements, row: Measured, base: str) -> Cell:
    """Create a cell that compares a configuration with the base configuration."""
    speed = lab.speed_up(base, row.key)
    if column == "change of memory":
        return cells.words(change(memory(lab.rows[base]), memory(row)))
    if column == "efficiency" and sharing(row):
        return cells.missing(sharing(row))
    if column == "efficiency":
        return cells.measured_share(speed.value / row.devices)
    return _speed_cell(speed, row.key == base)


def _ideal(row: Measured) -> Cell:
    found = row.metrics.bubble
    return Cell(share(found.ideal), found.ideal) if found else cells.missing(PIPELINE)


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


EMPTY = Cell(" ")
Keys = Sequence[str]


def _grid(
    lab: Measurements | None,
    title: str,
    corner: str,
    names: Sequence[str],
    columns: Sequence[str],
    cell: Callable[[int, str], Cell],
    note: str = "",
) -> Table:
    """Create a table with these row names. `cell` gets the row's index and the column. On a blank
    sheet, it is not called."""
    rows = tuple(
        (cells.name(name), *(cell(place, column) if lab else EMPTY for column in columns))
        for place, name in enumerate(names)
    )
    return Table(title, (corner, *columns), rows, note)


def _cell(lab: Measurements, key: str, column: str, base: str) -> Cell:
    if key not in lab.rows:
        return cells.missing(lab.why_not(key))
    row = lab.rows[key]
    return COLUMNS[column](row) if column in COLUMNS else _compared(column, lab, row, base)


def table(
    lab: Measurements | None, title: str, keys: Keys, columns: Sequence[str], base: str = ""
) -> Table:
    """Create a table with a row for each configuration."""

    def cell(place: int, column: str) -> Cell:
        assert lab
        return _cell(lab, keys[place], column, base or keys[0])

    note = lab.notes(keys, columns) if lab else ""
    return _grid(lab, title, "configuration", [LABELS[k] for k in keys], columns, cell, note)


def facing_table(
    lab: Measurements | None,
    title: str,
    keys: Keys,
    measures: Sequence[str],
    base: str = "",
    goals: Sequence[str] = (),
) -> Table:
    """Create a table with a column for each configuration."""

    def cell(place: int, label: str) -> Cell:
        assert lab
        if measures[place] == "goal":
            return cells.words(goals[keys.index(KEYS[label])])
        return _cell(lab, KEYS[label], measures[place], base)

    if lab and not any(key in lab.rows for key in keys):
        return Table(title, (), ())
    return _grid(lab, title, "", measures, [LABELS[key] for key in keys], cell)


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
    def cell(place: int, column: str) -> Cell:
        assert lab
        return RANK_COLUMNS[column](lab.rows[key], lab.rows[key].ranks[place])

    ranks = [str(rank.rank) for rank in lab.rows[key].ranks] if lab else ["0", "1"]
    return _grid(lab, title, "rank", ranks, columns, cell, lab.notes([key]) if lab else "")


def device_table(lab: Measurements | None, title: str, keys: Keys, columns: Sequence[str]) -> Table:
    """Create a table with a row for each device. It has a GPU load column only if NVML measured the
    load."""
    if lab is None:
        names = [f"{LABELS[key]}: device {number}" for key in keys for number in range(2)]
        return _grid(lab, title, "device", names, columns, lambda place, column: EMPTY)
    loads = any(lab.rows[key].metrics.load.gpu for key in keys)
    rows = [(lab.rows[key], n) for key in keys for n in range(len(lab.rows[key].peak_bytes))]
    return _grid(
        lab,
        title,
        "device",
        [f"{row.name}: {row.peak_bytes[n].device}" for row, n in rows],
        [name for name in columns if name != "GPU load" or loads],
        lambda place, column: _device(*rows[place], column),
        lab.notes(keys, columns),
    )


def _device(row: Measured, place: int, column: str) -> Cell:
    entry = row.peak_bytes[place]
    if column == "samples":
        return cells.exact(arrived(row)[place] if place < len(arrived(row)) else None)
    if column == "memory":
        return cells.held_bytes(entry.bytes)
    if column == "GPU load":
        load = {each.device: each.utilization for each in row.metrics.load.gpu}
        return cells.measured_share(load.get(entry.device), "NVML does not report it")
    busy = [] if row.strategy == "dp" and row.metrics.balance is None else row.metrics.busy
    share = busy[place].share if place < len(busy) else None
    return cells.measured_share(share, "the replicas run inside one call")


BUCKET_COLUMNS: Mapping[str, Callable[[Measured, int], Cell]] = {
    "data": lambda row, n: cells.held_bytes(row.observed.buckets[n].bytes),
    "starts after this share of backward()": lambda row, n: cells.measured_share(
        row.observed.buckets[n].share_of_backward
    ),
    "transfer": lambda row, n: cells.duration(row.metrics.buckets[n].transfer_seconds),
}


def bucket_table(lab: Measurements | None, title: str, key: str) -> Table:
    def cell(place: int, column: str) -> Cell:
        assert lab
        return BUCKET_COLUMNS[column](lab.rows[key], place)

    row = lab.rows[key] if lab else None
    known = min(len(row.observed.buckets), len(row.metrics.buckets)) if row else 1
    names, note = [str(number) for number in range(known)], "Rank 0, last step." if lab else ""
    return _grid(lab, title, "all-reduce", names, list(BUCKET_COLUMNS), cell, note)


COPYING = {
    "replicate": "copies the model to each device",
    "scatter": "splits the input",
    "gather": "collects the outputs on device 0",
    "reduce": "adds up the gradients on device 0",
}


def copying_table(lab: Measurements | None, title: str, keys: Keys) -> Table:
    def cell(place: int, label: str) -> Cell:
        assert lab
        found = copying(lab.rows[KEYS[label]], list(COPYING)[place])
        return cells.duration(found, "nn.DataParallel does it inside its calls")

    known = [LABELS[key] for key in keys if lab is None or key in lab.rows]
    names = [f"{kind}: {words}" for kind, words in COPYING.items()]
    return _grid(lab, title, "call", names, known, cell)


CHECKPOINT: Mapping[str, Callable[[Comparison, Measured], Cell]] = {
    "Python": lambda run, row: cells.name(run.machine.python),
    "torch": lambda run, row: cells.name(run.packages.get("torch")),
    "CUDA": lambda run, row: cells.name(run.machine.cuda or "none"),
    "machine": lambda run, row: cells.words(machine_words(run)),
    "data path": lambda run, row: cells.words(run.workload.data_path),
    "parameters": lambda run, row: cells.exact(run.workload.parameters),
    "ranks": lambda run, row: cells.exact(row.processes),
    "device": lambda run, row: cells.name(row.device),
    "runtime per step": lambda run, row: cells.step_time(row),
    "steps": lambda run, row: cells.exact(row.observed.steps),
    "first loss": lambda run, row: _loss(row.losses[0]),
    "last loss": lambda run, row: _loss(row.losses[-1]),
    "outcome": lambda run, row: cells.name(row.observed.status),
    "constraints": lambda run, row: cells.words("; ".join(row.remarks) or "none"),
}


def _loss(value: float | None) -> Cell:
    return Cell(f"{value:.4f}", value, value, value) if value else cells.missing("it is not finite")


def checkpoint_table(lab: Measurements | None, title: str, key: str) -> Table:
    """Create the handbook's verification checkpoint: what the run depends on and what it shows."""

    def cell(place: int, column: str) -> Cell:
        assert lab
        return list(CHECKPOINT.values())[place](lab.comparison, lab.rows[key])

    return _grid(lab, title, "fact", list(CHECKPOINT), ("value",), cell)


TABLES: Mapping[str, Callable[..., Table]] = {
    "table": table,
    "facing_table": facing_table,
    "rank_table": rank_table,
    "device_table": device_table,
    "bucket_table": bucket_table,
    "copying_table": copying_table,
    "checkpoint_table": checkpoint_table,
}
