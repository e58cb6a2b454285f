"""Read a search from its folder: the command to use, and its speed-up over the default."""

import dataclasses
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse.blocks import Cell, Document, Evidence, Finding, Line, Lines, Section
from paralab.analyse.compare import Row, comparison_of
from paralab.analyse.confidence import SpeedUp
from paralab.analyse.manifest import TuneManifest, manifest_of
from paralab.analyse.phrases import times_as_fast
from paralab.analyse.report import report
from paralab.analyse.result import PeakMemory, Spread
from paralab.analyse.table_cells import Cells, number, table
from paralab.analyse.verdict import is_same_training
from paralab.analyse.verify import Verification
from paralab.errors import UsageError
from paralab.record.types import Record
from paralab.units import seconds

DEFAULT_MB = 25.0  # PyTorch's default bucket size, which places the default on the curve
HIGH = ("fp32", "fp64")


class Tuned(Record, frozen=True, kw_only=True):
    """A configuration measured in the final rung."""

    name: str
    command: str
    step_seconds: Spread
    speed_up: SpeedUp
    precision: str
    loss_difference: float | None
    verify: Verification | None
    peak_bytes: list[PeakMemory]
    exposed_seconds: float | None


class CurvePoint(Record, frozen=True, kw_only=True):
    """One bucket size (None is PyTorch's default), with all other options at their defaults."""

    bucket_mb: float | None
    buckets: float
    step_seconds: float
    exposed_seconds: float | None
    communication_seconds: float | None


class TuneResult(Record, frozen=True, kw_only=True):
    """What `tune --json` prints: the fastest configuration that trains like the default, and the
    fastest one in low precision if that is even faster."""

    kind: str
    default: Tuned
    chosen: Tuned
    best_is_default: bool
    low_precision: Tuned | None
    curve: list[CurvePoint]
    rungs: list[str]
    run_folder: str
    seconds: float | None = None
    report: str | None = None  # the page, if one was written
    findings: tuple[Finding, ...] = ()  # the verdict in words


def choice_of(folder: Path) -> TuneResult:
    manifest = manifest_of(folder, TuneManifest)
    rungs = rungs_of(folder)
    final = comparison_of(rungs[-1])
    default = next((row for row in final.rows if row.name == manifest.default), None)
    if default is None:
        problem = f"The search in {folder} did not measure the default configuration."
        raise UsageError(problem, fix="run paralab tune again")
    faster = [r for r in final.rows if is_same_training(r) and r.ratio.verdict == "faster"]
    same = [row for row in faster if row.precision == default.precision]
    chosen = max(same, key=lambda row: row.ratio.value, default=default)
    rounded = [row for row in faster if row.precision not in (*HIGH, default.precision)]
    low = max(rounded, key=lambda row: row.ratio.value, default=None)
    return TuneResult(
        kind="tune",
        default=_tuned(default),
        chosen=_tuned(chosen),
        best_is_default=chosen is default,
        low_precision=_tuned(low) if low and low.ratio.value > chosen.ratio.value else None,
        curve=curve(rungs[0]),
        rungs=[rung.name for rung in rungs],
        run_folder=str(folder),
    )


def rungs_of(folder: Path) -> list[Path]:
    """Return the rungs that were started."""
    manifests = sorted(folder.glob("rung*/manifest.json"))
    if not manifests:
        problem = f"The search in {folder} was stopped before it measured anything."
        raise UsageError(problem, fix="run paralab tune again")
    return [path.parent for path in manifests]


def _tuned(row: Row) -> Tuned:
    return Tuned.like(row, exposed_seconds=row.metrics.exposed_communication_seconds)


def curve(rung: Path) -> list[CurvePoint]:
    """Return step time and exposed communication by bucket size."""
    rows = comparison_of(rung).rows
    others = [dataclasses.replace(row.request, bucket_mb=None) for row in rows]
    points = [
        CurvePoint.like(
            row.metrics,
            bucket_mb=row.request.bucket_mb,
            buckets=row.all_reduces_per_step,
            step_seconds=row.step_seconds.median,
            exposed_seconds=row.metrics.exposed_communication_seconds,
        )
        for row, options in zip(rows, others, strict=True)
        if options == others[0]
    ]
    return sorted(points, key=_megabytes) if len(points) > 1 else []


def _megabytes(point: CurvePoint) -> float:
    return point.bucket_mb or DEFAULT_MB


def document(folder: Path) -> Document:
    manifest, choice = manifest_of(folder, TuneManifest), choice_of(folder)
    final = rungs_of(folder)[-1]
    rest = report(comparison_of(final), final, _sections(choice))
    general = [each for each in rest.findings if each.kind in ("same", "warning")]
    title = f"Tune: {manifest.workload.name}"
    return replace(rest, title=title, findings=(*findings(choice), *general))


def _sections(choice: TuneResult) -> list[Section]:
    points = choice.curve
    if not points:
        return []
    exposed = [(_megabytes(p), p.exposed_seconds) for p in points]
    lines = (
        Line("step time", tuple((_megabytes(p), p.step_seconds) for p in points)),
        Line("exposed communication", tuple((x, y) for x, y in exposed if y is not None)),
    )
    names = ("bucket size in MB", "per optimizer step", "seconds")
    chart = Lines("Step time by bucket size", lines, *names, log_x=True)
    note = (
        "Each size ran for one round; the final rounds pick the winner. Each small bucket adds a "
        "fixed cost. Large buckets leave no computation to hide the communication behind."
    )
    return [Section("Bucket size", (chart, table("", map(_curve_row, points), note)))]


def _curve_row(point: CurvePoint) -> Cells:
    mb = point.bucket_mb
    return {
        "bucket": Cell("25 MB, the first 1 MB (default)" if mb is None else f"{mb:g} MB", mb),
        "all-reduces": Cell(f"{point.buckets:g}", point.buckets),
        "step time": number(point.step_seconds, seconds),
        "communication": number(point.communication_seconds, seconds),
        "exposed": number(point.exposed_seconds, seconds),
    }


def findings(choice: TuneResult) -> tuple[Finding, ...]:
    default, chosen, low = choice.default, choice.chosen, choice.low_precision
    before, after = default.step_seconds.median, chosen.step_seconds.median
    evidence: Evidence = {"default_seconds": before, "chosen_seconds": after}
    if choice.best_is_default:
        text = (
            f"Keep the default ({seconds(before)} per step): no setting with identical training "
            "results was measurably faster."
        )
    else:
        evidence["speed_up"] = chosen.speed_up.to_dict()
        text = (
            f"`{chosen.name}` takes {seconds(after)} per step, and the default {seconds(before)}: "
            f"{times_as_fast(chosen.speed_up)}. Use: `{chosen.command}`"
        )
    fastest = Finding("fastest", text, evidence)
    if not low:
        return (fastest,)
    moved = low.loss_difference
    losses = "are not finite" if moved is None else f"differ by up to {moved:.0e} (relative)"
    faster = f"In low precision, `{low.name}` is {times_as_fast(low.speed_up)}"
    text = f"{faster}; its losses {losses}. Use: `{low.command}`"
    evidence = {"speed_up": low.speed_up.to_dict(), "loss_difference": moved}
    return fastest, Finding("next", text, evidence)
