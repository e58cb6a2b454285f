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
from paralab.analyse.table_cells import Cells, exact, name, number, percent, table
from paralab.analyse.time_tables import where_time_goes
from paralab.analyse.verdict import is_same_training, largest_memory, verdict
from paralab.analyse.verify import apart_from
from paralab.units import plural, rate, seconds, size

Chart = Timeline | Schedule | Split | Lines
CLOCK = (
    "All ranks and devices on one clock. Hatched: exposed communication; dotted: waiting for a "
    "slower rank. Zoom in and hover for details."
)
COMPARED = ("speed-up", "efficiency", "same training")  # omitted for a single run


def report(comparison: Comparison, folder: Path, more: Sequence[Section] = ()) -> Document:
    """Return the full report for an experiment. The sections in `more` follow the first table."""
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
            *((where_time_goes(rows), *_sections(rows, recordings)) if rows else ()),
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
    times = {
        name: [step for run in runs for step in run.step_seconds]
        for name, runs in recordings.items()
    }
    groups = tuple(Group(name, tuple(values)) for name, values in times.items())
    steps = Distribution("Step times", groups, "seconds")
    cells = [_row(row) for row in rows]
    if len(rows) < 2:
        alone = [{k: v for k, v in row.items() if k not in COMPARED} for row in cells]
        return Section("The run", (table("", alone, _remarks(rows)), steps))

    speed = [
        Bar(row.name, r.value, r.low, r.high, f"{r.value:.2f}×  {r.verdict}")
        for row in rows
        for r in [row.ratio]
    ]
    efficient = [Bar(row.name, row.efficiency, text=f"{row.efficiency:.0%}") for row in rows]
    note = "Error bars show the 95 % confidence interval over the rounds."
    blocks = (
        table("", cells, _remarks(rows)),
        Bars(f"Speed-up over {baseline}", tuple(speed), "×", 1.0, note),
        Bars("Scaling efficiency: speed-up per device", tuple(efficient), "share", 1.0),
        steps,
    )
    return Section("Side by side", blocks)


def _remarks(rows: Sequence[Row]) -> str:
    """List virtual or shared devices in one note below the timing table."""
    named: dict[str, list[str]] = {}
    for row in rows:
        for remark in row.remarks:
            virtual = "devices are shares of one CPU (virtual)"
            named.setdefault(virtual if "virtual" in remark else remark, []).append(row.name)
    notes = ["communication: share of the step (exposed share)"]
    if len(rows) > 1:
        notes.insert(
            0,
            "step time: median over all steps; speed-up: mean over the rounds, in samples per second",
        )
    for remark, names in named.items():
        whose = "" if "virtual" in remark or len(names) > 3 else f" ({', '.join(names)})"
        notes.append(remark + whose)
    return "; ".join(notes)


def _row(row: Row) -> Cells:
    ratio, share, exposed = row.ratio, row.metrics.communication_share, row.metrics.exposed_share
    interval = "" if ratio.low is None else f" ({ratio.low:.2f}–{ratio.high:.2f})"
    speed = "1" if ratio.verdict == "baseline" else f"{ratio.value:.2f}{interval}"
    moved = f"{share:.0%} ({exposed:.0%})" if share else "none" if share == 0 else "not measured"
    return {
        "configuration": name(row.name),
        "devices": exact(row.devices),
        "step time": number(row.step_seconds.median, seconds),
        "samples/s": number(row.samples_per_second, rate),
        "per device": number(row.samples_per_second_per_device, rate),
        "speed-up": Cell(speed, ratio.value),
        "efficiency": percent(row.efficiency),
        "memory": number(largest_memory(row), size),
        "communication": Cell(moved, share),
        "same training": Cell(same_training(row), is_same_training(row)),
    }


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

    losses, memory = figures.loss_lines(rows), _memory(rows)
    sections = [
        Section("Timelines", all_of(lambda row: figures.timeline(last[row.name])), CLOCK),
        Section(
            "Pipeline schedules",
            all_of(lambda row: figures.schedule(last[row.name])),
            "One row per stage, numbered by micro-batch. The gaps are the bubble.",
        ),
        Section(
            "How the batch is split",
            all_of(lambda row: figures.split(row.batch, row.ranks)),
            "To scale: each piece is one pass or micro-batch.",
        ),
        Section("Memory", (memory,) if memory.rows else ()),
        Section(
            "Load and memory over time",
            (
                *all_of(lambda row: figures.load_lines(recordings[row.name])),
                *all_of(lambda row: figures.memory_lines(recordings[row.name])),
            ),
            "All rounds, one after the other.",
        ),
        Section(
            "Losses",
            (losses,) if losses else (),
            "Configurations with identical training have identical curves.",
        ),
        Section("Is the training the same?", (_verify(rows),)),
    ]
    return [section for section in sections if section.blocks]


def _memory(rows: Sequence[Row]) -> Table:
    memories = [(row, memory) for row in rows for memory in row.peak_bytes]
    kinds = {kind: kind for kind in ("parameters", "gradients", "optimizer", "activations")}
    if any(memory.gathered is not None for _, memory in memories):
        kinds |= FSDP_MEMORY
    cells = (
        {
            "configuration": name(row.name),
            "rank": exact(memory.rank),
            "device": name(memory.device),
            "peak": number(memory.bytes, size),
            **{column: _held(memory, kind) for kind, column in kinds.items()},
            "how": name(memory.how),
        }
        for row, memory in memories
    )
    note = (
        "counted: the sum of the tensors' sizes. allocator: the peak that CUDA's allocator "
        "reports, which does not list activations separately."
    )
    return table("Peak memory per device, and what uses it", cells, note)


# Memory that only fsdp uses: field -> column name.
FSDP_MEMORY = {"gathered": "gathered temporarily", "unreduced": "gradients not yet reduced"}


def _held(memory: PeakMemory, kind: str) -> Cell:
    value: int | None = memory[kind]
    return Cell("–") if value is None and kind in FSDP_MEMORY else number(value, size)


def _verify(rows: Sequence[Row]) -> Table:
    note = (
        "After training in fp64, all parameters are compared with those of a single device. The "
        "losses come from the timed runs."
    )
    return table("", map(_verify_row, rows), note)


def _verify_row(row: Row) -> Cells:
    check, moved = row.verify, row.loss_difference
    largest, tolerance = (check.max_difference, check.tolerance) if check else (None, None)
    cause = check.cause if check else "not checked"
    return {
        "configuration": name(row.name),
        "outcome": Cell(same_training(row), is_same_training(row)),
        "largest difference": Cell(
            "not measured" if largest is None else f"{largest:.1e}", largest
        ),
        "tolerance": Cell("not measured" if tolerance is None else f"{tolerance:g}", tolerance),
        "loss differs by": Cell("–" if moved is None else f"{moved:.1e} (relative)", moved),
        "cause": Cell(cause or "–", cause),
    }
