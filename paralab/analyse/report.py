"""Create the report document for a comparison or a single run, using only its folder."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse import blocks, explore, figures
from paralab.analyse.blocks import Bar, Bars, Cell, Distribution, Document, Group, Section, Table
from paralab.analyse.compare import Comparison, Row
from paralab.analyse.grid_tables import grid_tables
from paralab.analyse.phrases import machine_words, uncapital
from paralab.analyse.recording import Recording
from paralab.analyse.result import PeakMemory
from paralab.analyse.table_cells import Cells, exact, name, number, percent, table
from paralab.analyse.time_tables import where_time_goes
from paralab.analyse.verdict import is_same_training, largest_memory, verdict
from paralab.analyse.verify import apart_from, describe_simulated
from paralab.units import difference, plural, rate, seconds, size

Chart = blocks.Timeline | blocks.Schedule | blocks.Split | blocks.Lines
CLOCK = (
    "All ranks and devices on one clock. Hatched: exposed communication; dotted: waiting for a "
    "slower rank. Zoom in and hover for details."
)
COMPARED = ("speed-up", "efficiency", "same training")  # omitted for a single run
# A page of all strategies stays small: it has one step per timeline, and no load over time.
SPANS_PER_PAGE = 6000
MOST_OVER_TIME = 12  # configurations whose load and memory are drawn over time
MEMORY = ("parameters", "gradients", "optimizer", "activations")
# Memory that only fsdp uses: field -> column name.
FSDP_MEMORY = {"gathered": "gathered temporarily", "unreduced": "gradients not yet reduced"}


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
        explore=(explore.section(comparison),) if len(rows) > 1 else (),
        configuration=rows[0].name if len(rows) == 1 else "",
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
    groups = tuple(
        Group(name, tuple(step for run in runs for step in run.step_seconds))
        for name, runs in recordings.items()
    )
    steps = Distribution("Step times", groups, "seconds")
    cells = [_row(row) for row in rows]
    if len(rows) < 2:
        alone = [{k: v for k, v in row.items() if k not in COMPARED} for row in cells]
        return Section("The run", (table("", alone, _remarks(rows)), steps))

    ratios = [(row.name, row.ratio) for row in rows]
    speed = (Bar(n, r.value, r.low, r.high, f"{r.value:.2f}×, {r.verdict}") for n, r in ratios)
    efficient = (Bar(row.name, row.efficiency, text=f"{row.efficiency:.0%}") for row in rows)
    known = any(ratio.low is not None for name, ratio in ratios if name != baseline)
    note = "Error bars show the 95% confidence interval over the rounds." if known else ""
    charts = (
        Bars(f"Speed-up over {baseline}", tuple(speed), "×", 1.0, note),
        Bars("Scaling efficiency: speed-up per device", tuple(efficient), "share", 1.0),
    )
    return Section("Side by side", (table("", cells, _remarks(rows)), *charts, steps))


def _remarks(rows: Sequence[Row]) -> str:
    """List virtual or shared devices in one note below the timing table."""
    named: dict[str, list[str]] = {}
    for row in rows:
        for remark in row.remarks:
            virtual = "devices are shares of one CPU (virtual)"
            named.setdefault(virtual if "virtual" in remark else remark, []).append(row.name)
    notes = ["step time: median over the timed steps"] if len(rows) > 1 else []
    notes += ["speed-up: mean over the rounds"] if notes else []
    notes.append("communication: share of the step (exposed share)" + _backends(rows))
    for remark, names in named.items():
        is_general = "virtual" in remark or len(names) > 3 or len(rows) < 2
        whose = "" if is_general else f" ({', '.join(names)})"
        notes.append(remark + whose)
    return "; ".join(notes)


def _backends(rows: Sequence[Row]) -> str:
    """Return `, over local`, or list which configuration uses which backend if they differ."""
    users: dict[str, list[str]] = {}
    for row in rows:
        if row.backend:
            users.setdefault(row.backend, []).append(row.name)
    if len(users) < 2:
        return "".join(f", over {backend}" for backend in users)
    return ", over " + " and ".join(f"{name} ({', '.join(who)})" for name, who in users.items())


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
    """Return `equal`, `equal, loss ±2e-05` (in low precision), `equal apart from …`, `as simulated,
    …` (if it is lossy), `differs`, or `not proved`."""
    if row.verify is None:
        return "not checked"
    if not row.verify.passed:
        return "differs" if row.verify.ran else "not proved"
    if row.verify.as_simulated:
        return describe_simulated(row.verify)
    if reason := apart_from(row.verify):
        return f"equal apart from {reason}"
    if row.not_finite_losses:
        losses = "loss is" if row.not_finite_losses == 1 else "losses are"
        return f"equal, but {row.not_finite_losses} {losses} not finite"
    if row.precision in ("bf16", "fp16", "tf32") and row.loss_difference is not None:
        return f"equal, loss ±{difference(row.loss_difference, 0)}"
    return "equal"


def _sections(rows: Sequence[Row], recordings: dict[str, list[Recording]]) -> list[Section]:
    """Create the chart sections. A single run has no charts that compare configurations, and its
    charts do not repeat its name."""
    last = {name: list_[-1] for name, list_ in recordings.items()}
    several, checked = len(rows) > 1, len(rows) > 1 or rows[0].verify

    def title_of(name: str, what: str) -> str:
        return f"{name}: {uncapital(what)}" if several else what

    def all_of(draw: Callable[[Row], Chart | None]) -> tuple[Chart, ...]:
        drawn = ((row.name, draw(row)) for row in rows)
        return tuple(replace(b, title=title_of(name, b.title)) for name, b in drawn if b)

    losses, memory, checks = figures.loss_lines(rows), _memory(rows), map(_verify_row, rows)
    spans = min(figures.MOST_SPANS, SPANS_PER_PAGE // len(rows))
    over_time = Section(
        "Load and memory over time",
        (
            *all_of(lambda row: figures.load_lines(recordings[row.name])),
            *all_of(lambda row: figures.memory_lines(recordings[row.name])),
        )
        if len(rows) <= MOST_OVER_TIME
        else (),
        "All rounds, one after another." if len(rows[0].runs) > 1 else "",
    )
    same = (
        "After training in fp64, all parameters are compared with those of a single device. The "
        "losses come from the timed runs."
    )
    grids = [
        replace(t, title=title_of(n, t.title)) for n, r in last.items() for t in grid_tables(r.plan)
    ]
    sections = [
        Section("The grid of ranks", tuple(grids)),
        Section("Timelines", all_of(lambda row: figures.timeline(last[row.name], spans)), CLOCK),
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
        over_time,
        Section(
            "Losses",
            (losses,) if losses else (),
            "Configurations with identical training have identical curves." if several else "",
        ),
        Section("Is the training the same?", (table("", checks, same),) if checked else ()),
    ]
    return [section for section in sections if section.blocks]


def _memory(rows: Sequence[Row]) -> Table:
    memories = [(row, memory) for row in rows for memory in row.peak_bytes]
    kinds = {kind: kind for kind in MEMORY}
    if any(memory.gathered is not None for _, memory in memories):
        kinds |= FSDP_MEMORY
    estimated = any(memory.estimated_bytes is not None for _, memory in memories)
    cells = (
        {
            **({"configuration": name(row.name)} if len(rows) > 1 else {}),
            "rank": exact(memory.rank),
            "device": name(memory.device),
            "peak": number(memory.bytes, size),
            **(_estimate_cells(memory) if estimated else {}),
            **{
                column: number(memory[kind], size, "not measured" if kind in MEMORY else "–")
                for kind, column in kinds.items()
            },
            "how": name(memory.how),
        }
        for row, memory in memories
    )
    note = (
        "counted: the sum of the tensors' sizes. allocator: the peak that CUDA's allocator "
        "reports, which does not list activations separately."
    )
    return table("Peak memory per device, and what uses it", cells, note)


def _estimate_cells(memory: PeakMemory) -> Cells:
    return {
        "estimated": number(memory.estimated_bytes, size, "not estimated"),
        "error": number(memory.estimate_error, "{:+.1%}".format, "–"),
    }


def _verify_row(row: Row) -> Cells:
    check, moved = row.verify, row.loss_difference
    largest, tolerance = (check.max_difference, check.tolerance) if check else (None, None)
    cause = check.cause if check else "not checked"
    return {
        "configuration": name(row.name),
        "outcome": Cell(same_training(row), is_same_training(row)),
        "largest difference": number(largest, difference),
        "tolerance": number(tolerance, "{:g}".format),
        "loss differs by (relative)": number(moved, difference, "–"),
        "cause": Cell(cause or "–", cause),
    }
