"""The tables in a sheet, with a row for each configuration, device, rank, or bucket.

COLUMNS lists the columns that a template can use. A cell contains its number and spread, which are
used to grade a student's cell. On a blank sheet (`lab` is None), all cells but the first are empty.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Cell, Table
from paralab.analyse.compare import Comparison
from paralab.analyse.phrases import factor, listed, machine_words, share
from paralab.course import measurements as m
from paralab.course.configurations import KEYS, LABELS
from paralab.course.measurements import Measured, Measurements

PIPELINE = "there is no pipeline"
Lab = Measurements | None  # None for a blank sheet


def _activations(row: Measured) -> float | None:
    return max((e.activations for e in row.peak_bytes if e.activations), default=None)


def _loss_scale(row: Measured) -> Cell:
    scale = m.gradients(row).scale
    return cells.exact(scale) if scale else cells.name("none")


def _ideal(row: Measured) -> Cell:
    found = row.metrics.bubble
    return Cell(share(found.ideal), found.ideal) if found else cells.missing(PIPELINE)


def _copied(row: Measured, kind: str) -> Cell:
    return cells.duration(m.copying(row, kind), "nn.DataParallel does it inside its calls")


def _shares(values: Sequence[float]) -> Cell:
    if not values:
        return cells.missing("the replicas run inside one call")
    text = listed([share(value) for value in values])
    return Cell(text, sum(values) / len(values), min(values), max(values))


COLUMNS: Mapping[str, Callable[[Measured], Cell]] = {
    "processes": lambda row: cells.exact(row.processes),
    "devices": lambda row: cells.exact(row.devices),
    "devices of rank 0": lambda row: cells.name(listed(list(dict.fromkeys(row.ranks[0].devices)))),
    "world size": lambda row: cells.exact(len(row.ranks)),
    "batch": lambda row: cells.exact(row.batch.size),
    "batch // world size": lambda row: cells.exact(row.batch.size // len(row.ranks)),
    "dropped by //": lambda row: cells.exact(row.batch.size % len(row.ranks)),
    "split": lambda row: cells.split(m.arrived(row)),
    "batch ÷ devices, rounded up": lambda row: cells.exact(m.ceil_div(row.batch.size, row.devices)),
    "equal": lambda row: cells.yes_no(len(set(m.arrived(row))) == 1),
    "samples per rank": lambda row: cells.exact(row.ranks[0].samples_per_step),
    "samples per pass": lambda row: cells.exact(m.arrived(row)[0]),
    "samples per micro-batch": lambda row: cells.name(m.micro_sizes(row)),
    "micro-batches": lambda row: cells.exact(row.observed.passes.micro_batches),
    "forward passes": lambda row: cells.exact(row.observed.passes.forward),
    "backward passes": lambda row: cells.exact(row.observed.passes.backward),
    "optimizer steps": lambda row: cells.exact(row.observed.optimizer_steps),
    "step time": cells.step_time,
    "total time": lambda row: cells.duration(row.total_seconds),
    "samples per second": lambda row: cells.per_second(row.samples_per_second),
    "per device": lambda row: cells.per_second(row.samples_per_second_per_device),
    "memory": lambda row: cells.held_bytes(m.memory(row)),
    "activations": lambda row: cells.held_bytes(_activations(row), "only the peak is known"),
    "busy share": lambda row: _shares(m.busy_shares(row)),
    "replicate: copies the model to each device": lambda row: _copied(row, "replicate"),
    "scatter: splits the input": lambda row: _copied(row, "scatter"),
    "gather: collects the outputs on device 0": lambda row: _copied(row, "gather"),
    "reduce: adds up the gradients on device 0": lambda row: _copied(row, "reduce"),
    "communication": lambda row: cells.duration(row.metrics.communication_seconds),
    "exposed": lambda row: cells.duration(row.metrics.exposed_communication_seconds),
    "hidden share": lambda row: cells.measured_share(row.metrics.overlap),
    "all-reduces": lambda row: cells.exact(row.all_reduces_per_step),
    "all-reduces per pass": lambda row: cells.exact(
        row.all_reduces_per_step / row.observed.passes.backward
    ),
    "data per step": lambda row: cells.held_bytes(row.bytes_per_step),
    "bubble": lambda row: cells.measured_share(m.bubble(row), PIPELINE),
    "ideal bubble": _ideal,
    "equal to single": lambda row: cells.yes_no(row.verify.equal if row.verify else None),
    "loss difference": lambda row: cells.measured_share(row.loss_difference, "it is not finite"),
    "skipped steps": lambda row: cells.exact(row.skipped_steps),
    "loss scale": _loss_scale,
    "gradients": lambda row: cells.exact(m.gradients(row).total),
    "zero gradients": lambda row: cells.exact(m.gradients(row).zeros),
    "share of zeros": lambda row: cells.measured_share(m.zero_share(row)),
}


def _loss(value: float | None) -> Cell:
    return Cell(f"{value:.4f}", value, value, value) if value else cells.missing("it is not finite")


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


EMPTY = Cell(" ")
Keys = Sequence[str]
Reader = Callable[[str], Cell]  # returns a row's cell for a column


def _grid(
    title: str, corner: str, names: Keys, columns: Keys, read: Sequence[Reader] = (), note: str = ""
) -> Table:
    """Create a table with these row names. Without readers, its cells are empty."""
    readers = read or [lambda column: EMPTY] * len(names)
    rows = [
        (cells.name(name), *(reader(column) for column in columns))
        for name, reader in zip(names, readers, strict=True)
    ]
    return Table(title, (corner, *columns), tuple(rows), note)


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
    if column == "efficiency" and m.sharing(row):
        return cells.missing(m.sharing(row))

    speed = lab.speed_up(base, key)
    if column == "efficiency":
        return cells.measured_share(speed.value / row.devices)
    if key == base:
        return cells.exact(1)
    low, high = (speed.value if end is None else end for end in (speed.low, speed.high))
    return Cell(f"{factor(speed.value)}× ({m.interval(speed)})", speed.value, low, high)


def table(lab: Lab, title: str, keys: Keys, columns: Keys, base: str = "") -> Table:
    """Create a table with a row for each configuration."""
    names = [LABELS[key] for key in keys]
    read = [partial(_cell, lab, base or keys[0], key) for key in keys] if lab else ()
    note = lab.notes(keys, columns) if lab else ""
    return _grid(title, "configuration", names, columns, read, note)


def facing_table(
    lab: Lab, title: str, keys: Keys, measures: Keys, base: str = "", goals: Keys = ()
) -> Table:
    """Create a table with a column for each configuration."""

    def read(measure: str, label: str) -> Cell:
        assert lab
        if measure == "goal":
            return cells.words(goals[keys.index(KEYS[label])])
        return _cell(lab, base, KEYS[label], measure)

    if lab and not any(key in lab.rows for key in keys):
        return Table(title, (), ())
    readers = [partial(read, measure) for measure in measures] if lab else ()
    return _grid(title, "", measures, [LABELS[key] for key in keys], readers)


RANK_COLUMNS: Mapping[str, Callable[[Measured, Any], Cell]] = {
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
        return _grid(title, "rank", ["0", "1"], columns)
    row = lab.rows[key]
    read = [partial(lambda rank, column: RANK_COLUMNS[column](row, rank), r) for r in row.ranks]
    return _grid(title, "rank", [str(r.rank) for r in row.ranks], columns, read, lab.notes([key]))


def device_table(lab: Lab, title: str, keys: Keys, columns: Keys) -> Table:
    """Create a table with a row for each device. It has a GPU load column only if NVML measured the
    load."""
    if lab is None:
        names = [f"{LABELS[key]}: device {number}" for key in keys for number in range(2)]
        return _grid(title, "device", names, columns)
    loads = any(lab.rows[key].metrics.load.gpu for key in keys)
    rows = [(lab.rows[key], n) for key in keys for n in range(len(lab.rows[key].peak_bytes))]
    names = [f"{row.name}: {row.peak_bytes[n].device}" for row, n in rows]
    columns = [name for name in columns if name != "GPU load" or loads]
    read = [partial(_device, *row) for row in rows]
    return _grid(title, "device", names, columns, read, lab.notes(keys, columns))


def _device(row: Measured, place: int, column: str) -> Cell:
    entry = row.peak_bytes[place]
    if column == "samples":
        return cells.exact(m.arrived(row)[place] if place < len(m.arrived(row)) else None)
    if column == "memory":
        return cells.held_bytes(entry.bytes)
    if column == "GPU load":
        load = {each.device: each.utilization for each in row.metrics.load.gpu}
        return cells.measured_share(load.get(entry.device), "NVML does not report it")
    busy = [] if row.strategy == "dp" and row.metrics.balance is None else row.metrics.busy
    share = busy[place].share if place < len(busy) else None
    return cells.measured_share(share, "the replicas run inside one call")


STARTS = "starts after this share of backward()"
BUCKET_COLUMNS: Mapping[str, Callable[[Measured, int], Cell]] = {
    "data": lambda row, n: cells.held_bytes(row.observed.buckets[n].bytes),
    STARTS: lambda row, n: cells.measured_share(row.observed.buckets[n].share_of_backward),
    "transfer": lambda row, n: cells.duration(row.metrics.buckets[n].transfer_seconds),
}


def bucket_table(lab: Lab, title: str, key: str) -> Table:
    if lab is None:
        return _grid(title, "all-reduce", ["0"], list(BUCKET_COLUMNS))
    row = lab.rows[key]
    known = range(min(len(row.observed.buckets), len(row.metrics.buckets)))
    read = [partial(lambda n, column: BUCKET_COLUMNS[column](row, n), n) for n in known]
    names = [str(n) for n in known]
    return _grid(title, "all-reduce", names, list(BUCKET_COLUMNS), read, "Rank 0, last step.")


MADE = (table, facing_table, rank_table, device_table, bucket_table)
TABLES: Mapping[str, Callable[..., Table]] = {make.__name__: make for make in MADE}
