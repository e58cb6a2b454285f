"""Create the report document for a comparison or a single run, using only its folder."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse import figures
from paralab.analyse.blocks import (
    Bar,
    Bars,
    Block,
    Cell,
    Distribution,
    Document,
    Group,
    Lines,
    Schedule,
    Section,
    Split,
    Table,
    Timeline,
)
from paralab.analyse.compare import Comparison, Row
from paralab.analyse.phrases import machine_words
from paralab.analyse.recording import Recording
from paralab.analyse.result import PeakMemory
from paralab.analyse.time_tables import number, where_time_goes
from paralab.analyse.verdict import is_same_training, largest_memory, verdict
from paralab.analyse.verify import apart_from
from paralab.units import plural, rate, seconds, size

Chart = Timeline | Schedule | Split | Lines
CLOCK = (
    "All ranks and devices on one clock. Hatched: exposed communication; dotted: waiting for a "
    "slower rank. Zoom in and hover for details."
)
COLUMNS = (
    "configuration",
    "devices",
    "step time",
    "samples/s",
    "per device",
    "speed-up",
    "efficiency",
    "memory",
    "communication",
    "same training",
)
COMPARED = ("speed-up", "efficiency", "same training")  # omitted for a single run


def report(comparison: Comparison, folder: Path, more: Sequence[Section] = ()) -> Document:
    """Return the full report for an experiment. `more` sections follow the first table."""
    rows = comparison.rows
    recordings = {row.name: [Recording.read(folder / run) for run in row.runs] for row in rows}
    subtitle = rows[0].name if len(rows) == 1 else plural(len(rows), "configuration")
    if len({row.batch.size for row in rows}) == 1:
        subtitle += f" with batch size {rows[0].batch.size}"
    if comparison.rounds > 1:
        subtitle += f", {plural(comparison.rounds, 'round')}"
    return Document(
        title=f"{comparison.kind.capitalize()}: {comparison.workload.name}",
        subtitle=f"{subtitle}, on {machine_words(comparison)}",
        findings=verdict(comparison),
        sections=(
            _side_by_side(rows, recordings, comparison.baseline),
            *more,
            where_time_goes(rows),
            *_sections(rows, recordings),
        ),
        facts=facts(comparison),
    )


def facts(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    machine, packages, workload = comparison.machine, comparison.packages, comparison.workload
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return (
        ("machine", machine_words(comparison)),
        ("memory", size(machine.memory_bytes)),
        ("versions", f"Python {machine.python}, {versions}, CUDA {machine.cuda or 'none'}"),
        ("workload", f"{workload.name}: {workload.parameters:,} parameters"),
        ("data", str(workload.data_path)),
        ("command", shlex.join(["paralab", *comparison.command[1:]])),
    )


def _side_by_side(
    rows: Sequence[Row], recordings: dict[str, list[Recording]], baseline: str | None
) -> Section:
    kept = [place for place, name in enumerate(COLUMNS) if len(rows) > 1 or name not in COMPARED]
    cells = tuple(tuple(row[place] for place in kept) for row in map(_row, rows))
    table = Table("", tuple(COLUMNS[place] for place in kept), cells, _remarks(rows))
    speed = [
        Bar(
            row.name,
            row.ratio.value,
            row.ratio.low,
            row.ratio.high,
            f"{row.ratio.value:.2f}×  {row.ratio.verdict}",
        )
        for row in rows
    ]
    efficient = [Bar(row.name, row.efficiency, text=f"{row.efficiency:.0%}") for row in rows]
    times = {
        name: [s for recording in list_ for s in recording.step_seconds]
        for name, list_ in recordings.items()
    }
    bars = (
        Bars(
            f"Speed-up over {baseline}",
            tuple(speed),
            "×",
            1.0,
            "Error bars show the 95 % confidence interval over the rounds.",
        ),
        Bars("Scaling efficiency: speed-up per device", tuple(efficient), "share", 1.0),
    )
    steps = Distribution(
        "Step times", tuple(Group(name, tuple(values)) for name, values in times.items()), "seconds"
    )
    return Section(
        "Side by side" if len(rows) > 1 else "The run",
        (table, *(bars if len(rows) > 1 else ()), steps),
    )


def _remarks(rows: Sequence[Row]) -> str:
    """List virtual or shared devices in one note below the timing table."""
    named: dict[str, list[str]] = {}
    for row in rows:
        for remark in row.remarks:
            named.setdefault(
                "devices are shares of one CPU (virtual)" if "virtual" in remark else remark, []
            ).append(row.name)
    told = [
        remark + ("" if "virtual" in remark or len(names) > 3 else f" ({', '.join(names)})")
        for remark, names in named.items()
    ]
    how = (
        "step time: median over all steps; speed-up: mean over the rounds, in samples per second"
        if len(rows) > 1
        else ""
    )
    return "; ".join(filter(None, [how, "communication: share of the step (exposed share)", *told]))


def _row(row: Row) -> tuple[Cell, ...]:
    times, ratio, metrics = row.step_seconds, row.ratio, row.metrics
    interval = "" if ratio.low is None else f" ({ratio.low:.2f}–{ratio.high:.2f})"
    share = metrics.communication_share
    return (
        Cell(row.name, row.name),
        Cell(str(row.devices), row.devices),
        number(times.median, seconds(times.median)),
        number(row.samples_per_second, rate(row.samples_per_second)),
        number(row.samples_per_second_per_device, rate(row.samples_per_second_per_device)),
        Cell(
            "1" if ratio.verdict == "baseline" else f"{ratio.value:.2f}{interval}",
            ratio.value,
        ),
        Cell(f"{row.efficiency:.0%}", row.efficiency),
        number(largest_memory(row), size(largest_memory(row))),
        Cell("none" if not share else f"{share:.0%} ({metrics.exposed_share:.0%})", share),
        Cell(same_training(row), is_same_training(row)),
    )


def same_training(row: Row) -> str:
    """Return `equal`; `equal, loss ±2e-05` (equal in fp64; bf16 changes the loss by this much);
    `equal apart from BatchNorm`; or `differs`."""
    if row.verify is None:
        return "not checked"
    if not row.verify.equal:
        return "differs"
    if reason := apart_from(row.verify):
        return f"equal apart from {reason}"
    if row.not_finite_losses:
        losses = "loss is" if row.not_finite_losses == 1 else "losses are"
        return f"equal, but {row.not_finite_losses} {losses} not finite"
    if row.precision in ("bf16", "fp16", "tf32") and row.loss_difference is not None:
        return f"equal, loss ±{row.loss_difference:.0e}"
    return "equal"


def _sections(rows: Sequence[Row], recordings: dict[str, list[Recording]]) -> list[Section]:
    """Create the chart sections, grouped by kind."""
    last = {name: list_[-1] for name, list_ in recordings.items()}

    def all_of(draw: Callable[[Row], Chart | None]) -> tuple[Block, ...]:
        return tuple(
            replace(block, title=f"{row.name}: {block.title}")
            for row in rows
            if (block := draw(row))
        )

    timelines = all_of(lambda row: figures.timeline(last[row.name]))
    schedules = all_of(lambda row: figures.schedule(last[row.name]))
    splits = all_of(lambda row: figures.split(row.batch, row.ranks))
    load = all_of(lambda row: figures.load_lines(recordings[row.name]))
    memory = all_of(lambda row: figures.memory_lines(recordings[row.name]))
    losses = figures.loss_lines([row for row in rows if row.losses])
    sections = [
        Section("Timelines", timelines, CLOCK),
        Section(
            "Pipeline schedules",
            schedules,
            "One row per stage, numbered by micro-batch. The gaps are the bubble.",
        ),
        Section(
            "How the batch is split", splits, "To scale: each piece is one pass or micro-batch."
        ),
        Section("Memory", (_memory(rows),)),
        Section("Load and memory over time", (*load, *memory), "All rounds, one after the other."),
        Section(
            "Losses",
            (losses,) if losses else (),
            "Configurations that train the same have the same curve.",
        ),
        Section("The same training?", (_verify(rows),)),
    ]
    return [section for section in sections if section.blocks]


def _memory(rows: Sequence[Row]) -> Table:
    kinds = {kind: kind for kind in ("parameters", "gradients", "optimizer", "activations")}
    if any(memory.gathered is not None for row in rows for memory in row.peak_bytes):
        kinds |= FSDP_MEMORY
    columns = ("configuration", "rank", "device", "peak", *kinds.values(), "how")
    cells = [
        (
            Cell(row.name, row.name),
            Cell(str(memory.rank), memory.rank),
            Cell(memory.device, memory.device),
            Cell(size(memory.bytes), memory.bytes),
            *(_held(memory, kind) for kind in kinds),
            Cell(memory.how, memory.how),
        )
        for row in rows
        for memory in row.peak_bytes
    ]
    note = (
        "counted: added up from the tensors. allocator: the peak that CUDA's allocator reports; it "
        "does not list activations separately."
    )
    return Table("Peak memory per device, and what uses it", columns, tuple(cells), note)


# Memory that only fsdp uses: field -> column name.
FSDP_MEMORY = {"gathered": "gathered temporarily", "unreduced": "gradients not yet reduced"}


def _held(memory: PeakMemory, kind: str) -> Cell:
    value: int | None = memory[kind]
    if value is None and kind in FSDP_MEMORY:
        return Cell("–", None)
    return number(value, size(value))


def _verify(rows: Sequence[Row]) -> Table:
    columns = (
        "configuration",
        "outcome",
        "largest difference",
        "tolerance",
        "loss differs by",
        "cause",
    )
    cells = []
    for row in rows:
        check, moved = row.verify, row.loss_difference
        largest, tolerance = (check.max_difference, check.tolerance) if check else (None, None)
        cause = check.cause if check else "not checked"
        cells.append(
            (
                Cell(row.name, row.name),
                Cell(same_training(row), is_same_training(row)),
                number(largest, f"{largest or 0.0:.1e}"),
                number(tolerance, f"{tolerance or 0.0:g}"),
                Cell("–" if moved is None else f"{moved:.1e} (relative)", moved),
                Cell(cause or "–", cause),
            )
        )
    note = (
        "All parameters after training in fp64 are compared with a single device. The losses come "
        "from the timed runs."
    )
    return Table("", columns, tuple(cells), note)
