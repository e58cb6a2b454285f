"""The tables in a sheet, with a row for each configuration, device, rank, or bucket.

COLUMNS lists the columns that a template can use. A cell contains its number and spread, so that a
student's cell can be graded. On a blank sheet (`lab` is None), only the first column is filled in.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Cell, Table
from paralab.analyse.compare import Comparison
from paralab.analyse.phrases import factor, listed, machine_words, share, slashes
from paralab.analyse.result import Rank
from paralab.course import measurements as m
from paralab.course.configurations import KEYS, LABELS
from paralab.course.measurements import Measured, Measurements
from paralab.plan.remarks import find_sharing
from paralab.units import rate, seconds, size

NO_PIPELINE = "this is not a pipeline"
INSIDE = "the replicas run inside one call"
Lab = Measurements | None  # None for a blank sheet


def _time(value: float | None, why_not: str = "") -> Cell:
    return cells.measured(value, seconds, why_not)


def _share(value: float | None, why_not: str = "") -> Cell:
    return cells.measured(value, share, why_not)


def _size(value: float | None, why_not: str = "") -> Cell:
    """Create a cell for counted bytes, which are the same in all runs."""
    return cells.missing(why_not) if value is None else Cell(size(value), int(value))


def _yes_no(value: bool | None) -> Cell:
    return Cell("unclear" if value is None else "yes" if value else "no", value)


def _communication(value: float | None) -> Cell:
    return Cell("none", value) if value == 0 else _time(value)


def _step_time(row: Measured) -> Cell:
    times = row.step_seconds
    return Cell(seconds(times.median), times.median, times.p10, times.p90)


def _activations(row: Measured) -> Cell:
    largest = max((e.activations for e in row.peak_bytes if e.activations), default=None)
    return _size(largest, "only the peak is known")


def _loss_scale(row: Measured) -> Cell:
    scale = m.gradients(row).scale
    return cells.exact(scale) if scale else cells.name("none")


def _ideal(row: Measured) -> Cell:
    bubble = row.metrics.bubble
    return Cell(share(bubble.ideal), bubble.ideal) if bubble else cells.missing(NO_PIPELINE)


def _copy_seconds(row: Measured, kind: str) -> Cell:
    return _time(row.observed.copying.get(kind), "nn.DataParallel does it inside its calls")


def _busy(row: Measured) -> Cell:
    values = m.busy_shares(row)
    if not values:
        return cells.missing(INSIDE)
    return Cell(listed(map(share, values)), statistics.mean(values), min(values), max(values))


def _loss(value: float | None) -> Cell:
    return cells.measured(value or None, "{:.4f}".format, "it is not finite")


COLUMNS: Mapping[str, Callable[[Measured], Cell]] = {
    "processes": lambda row: cells.exact(row.processes),
    "devices": lambda row: cells.exact(row.devices),
    "devices of rank 0": lambda row: cells.name(listed(dict.fromkeys(row.ranks[0].devices))),
    "world size": lambda row: cells.exact(len(row.ranks)),
    "batch": lambda row: cells.exact(row.batch.size),
    "batch // world size": lambda row: cells.exact(row.batch.size // len(row.ranks)),
    "dropped by //": lambda row: cells.exact(row.batch.size % len(row.ranks)),
    "split": lambda row: cells.name(slashes(m.arrived(row))),
    "batch ÷ devices, rounded up": lambda row: cells.exact(-(-row.batch.size // row.devices)),
    "equal": lambda row: _yes_no(len(set(m.arrived(row))) == 1),
    "samples per rank": lambda row: cells.exact(row.ranks[0].samples_per_step),
    "samples per pass": lambda row: cells.exact(m.arrived(row)[0]),
    "samples per micro-batch": lambda row: cells.name(m.micro_sizes(row)),
    "micro-batches": lambda row: cells.exact(row.observed.passes.micro_batches),
    "forward passes": lambda row: cells.exact(row.observed.passes.forward),
    "backward passes": lambda row: cells.exact(row.observed.passes.backward),
    "optimizer steps": lambda row: cells.exact(row.observed.optimizer_steps),
    "step time": _step_time,
    "total time": lambda row: _time(row.total_seconds),
    "samples per second": lambda row: cells.measured(row.samples_per_second, rate),
    "per device": lambda row: cells.measured(row.samples_per_second_per_device, rate),
    "memory": lambda row: _size(m.memory(row)),
    "activations": _activations,
    "busy share": _busy,
    "replicate: copies the model to each device": lambda row: _copy_seconds(row, "replicate"),
    "scatter: splits the input": lambda row: _copy_seconds(row, "scatter"),
    "gather: collects the outputs on device 0": lambda row: _copy_seconds(row, "gather"),
    "reduce: adds up the gradients on device 0": lambda row: _copy_seconds(row, "reduce"),
    "communication": lambda row: _communication(row.metrics.communication_seconds),
    "exposed": lambda row: _communication(row.metrics.exposed_communication_seconds),
    "hidden share": lambda row: _share(row.metrics.overlap),
    "all-reduces": lambda row: cells.exact(row.all_reduces_per_step),
    "all-reduces per pass": lambda row: cells.exact(
        row.all_reduces_per_step / row.observed.passes.backward
    ),
    "data per step": lambda row: _size(row.bytes_per_step),
    "bubble": lambda row: _share(m.bubble(row), NO_PIPELINE),
    "ideal bubble": _ideal,
    "equal to single": lambda row: _yes_no(
        row.verify.equal if row.verify and row.verify.ran else None
    ),
    "loss difference": lambda row: _share(row.loss_difference, "it is not finite"),
    "skipped steps": lambda row: cells.exact(row.skipped_steps),
    "loss scale": _loss_scale,
    "gradients": lambda row: cells.exact(m.gradients(row).total),
    "zero gradients": lambda row: cells.exact(m.gradients(row).zeros),
    "share of zeros": lambda row: _share(m.zero_share(row)),
}


CHECKPOINT: Mapping[str, Callable[[Comparison, Measured], Cell]] = {
    "Python": lambda run, row: cells.name(run.machine.python),
    "torch": lambda run, row: cells.name(run.packages.get("torch")),
    "CUDA": lambda run, row: cells.name(run.machine.cuda or "none"),
    "machine": lambda run, row: cells.words(machine_words(run)),
    "data path": lambda run, row: cells.words(run.workload.data_path),
    "parameters": lambda run, row: cells.exact(run.workload.parameters),
    "ranks": lambda run, row: cells.exact(row.processes),
    "device": lambda run, row: cells.name(row.device),
    "runtime per step": lambda run, row: _step_time(row),
    "steps": lambda run, row: cells.exact(row.observed.steps),
    "first loss": lambda run, row: _loss(row.losses[0]),
    "last loss": lambda run, row: _loss(row.losses[-1]),
    "outcome": lambda run, row: cells.name(row.observed.status),
    "constraints": lambda run, row: cells.words("; ".join(row.remarks) or "none"),
}


Keys = Sequence[str]
Rows = Sequence[tuple[str, Callable[[str], Cell]]]  # a name, and a function of the column


def _empty(column: str) -> Cell:
    return Cell(" ")


def _grid(title: str, corner: str, rows: Rows, columns: Keys, note: str = "") -> Table:
    filled = [(cells.name(name), *map(read, columns)) for name, read in rows]
    return Table(title, (corner, *columns), tuple(filled), note)


def _cell(lab: Measurements, base: str, key: str, column: str) -> Cell:
    if key not in lab.rows:
        return cells.missing(lab.why_not(key))
    row = lab.rows[key]
    if column in COLUMNS:
        return COLUMNS[column](row)
    if column in CHECKPOINT:
        return CHECKPOINT[column](lab.comparison, row)
    if column == "change of memory":
        return cells.words(m.change(m.memory(lab.rows[base]), m.memory(row)))
    shared, speed = find_sharing(row.remarks), lab.speed_up(base, key)
    if column == "efficiency":
        return _share(None if shared else speed.value / row.devices, shared)
    if key == base:
        return cells.exact(1)
    low, high = (speed.value if end is None else end for end in (speed.low, speed.high))
    return Cell(f"{factor(speed.value)}× ({m.interval(speed)})", speed.value, low, high)


def table(lab: Lab, title: str, keys: Keys, columns: Keys, base: str = "") -> Table:
    """Create a table with a row for each configuration."""
    rows = [
        (LABELS[key], partial(_cell, lab, base or keys[0], key) if lab else _empty) for key in keys
    ]
    return _grid(title, "configuration", rows, columns, lab.notes(keys, columns) if lab else "")


def facing_table(
    lab: Lab, title: str, keys: Keys, measures: Keys, base: str = "", goals: Keys = ()
) -> Table:
    """Create a table with a column for each configuration."""

    def read(measure: str, label: str) -> Cell:
        if lab is None:
            return _empty(label)
        if measure == "goal":
            return cells.words(goals[keys.index(KEYS[label])])
        return _cell(lab, base, KEYS[label], measure)

    if lab and not any(key in lab.rows for key in keys):
        return Table(title, (), ())
    rows = [(measure, partial(read, measure)) for measure in measures]
    return _grid(title, "", rows, [LABELS[key] for key in keys])


RANK_COLUMNS: Mapping[str, Callable[[Measured, Rank], Cell]] = {
    "local rank": lambda row, rank: cells.exact(rank.local_rank),
    "world size": lambda row, rank: cells.exact(len(row.ranks)),
    "process": lambda row, rank: cells.words(rank.pid),
    "device": lambda row, rank: cells.name(listed(rank.devices)),
    "stage devices": lambda row, rank: cells.name(listed(rank.devices)),
    "samples": lambda row, rank: cells.exact(rank.samples_per_step),
    "micro-batches": lambda row, rank: cells.exact(row.batch.micro_batches),
    "samples per micro-batch": lambda row, rank: cells.name(m.micro_sizes(row)),
}


def rank_table(lab: Lab, title: str, key: str, columns: Keys) -> Table:
    if lab is None:
        return _grid(title, "rank", [("0", _empty), ("1", _empty)], columns)
    row = lab.rows[key]

    def read(rank: Rank, column: str) -> Cell:
        return RANK_COLUMNS[column](row, rank)

    rows = [(str(rank.rank), partial(read, rank)) for rank in row.ranks]
    return _grid(title, "rank", rows, columns, lab.notes([key]))


def device_table(lab: Lab, title: str, keys: Keys, columns: Keys) -> Table:
    """Create a table with a row for each device, and a GPU load column if NVML measured it."""
    if lab is None:
        names = [f"{LABELS[key]}: device {number}" for key in keys for number in range(2)]
        return _grid(title, "device", [(name, _empty) for name in names], columns)
    measured = [lab.rows[key] for key in keys]
    rows = [
        (f"{row.name}: {memory.device}", partial(_device, row, number))
        for row in measured
        for number, memory in enumerate(row.peak_bytes)
    ]
    loads = any(row.metrics.load.gpu for row in measured)
    columns = [name for name in columns if name != "GPU load" or loads]
    return _grid(title, "device", rows, columns, lab.notes(keys, columns))


def _device(row: Measured, number: int, column: str) -> Cell:
    memory, samples = row.peak_bytes[number], m.arrived(row)
    if column == "samples":
        return cells.exact(samples[number] if number < len(samples) else None)
    if column == "memory":
        return _size(memory.bytes)
    if column == "GPU load":
        load = {each.device: each.utilization for each in row.metrics.load.gpu}
        return _share(load.get(memory.device), "NVML does not report it")
    busy = [] if row.strategy == "dp" and row.metrics.balance is None else row.metrics.busy
    return _share(busy[number].share if number < len(busy) else None, INSIDE)


STARTS = "starts after this share of backward()"


def bucket_table(lab: Lab, title: str, key: str) -> Table:
    columns = ("all-reduce", "data", STARTS, "transfer")
    if lab is None:
        return _grid(title, columns[0], [("0", _empty)], columns[1:])
    row = lab.rows[key]
    pairs = zip(row.observed.buckets, row.metrics.buckets, strict=False)
    rows = [
        (
            cells.name(number),
            _size(started.bytes),
            _share(started.share_of_backward),
            _time(bucket.transfer_seconds),
        )
        for number, (started, bucket) in enumerate(pairs)
    ]
    return Table(title, columns, tuple(rows), "Rank 0, last step.")


MADE = (table, facing_table, rank_table, device_table, bucket_table)
TABLES: Mapping[str, Callable[..., Table]] = {make.__name__: make for make in MADE}
