"""Read a search from its folder: the command to use, its speed-up over the default, its margin over
the runners-up, and what was not measured."""

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse.blocks import Cell, Document, Evidence, Finding, Line, Lines, Section
from paralab.analyse.compare import Row, comparison_of
from paralab.analyse.confidence import SpeedUp, speed_up
from paralab.analyse.manifest import SearchNotes, TuneManifest, manifest_of
from paralab.analyse.phrases import interval, times_as_fast
from paralab.analyse.report import report
from paralab.analyse.result import PeakMemory, Spread
from paralab.analyse.table_cells import Cells, exact, name, table, words
from paralab.analyse.table_cells import number as measure
from paralab.analyse.verdict import largest_memory
from paralab.analyse.verify import Verification
from paralab.errors import UsageError
from paralab.plan.lossy import is_lossy
from paralab.record.types import Record, convert, read_object
from paralab.units import difference, plural, rate, seconds, size

DEFAULT_MB = 25.0  # PyTorch's default bucket size, which places the default on the curve
HIGH = ("fp32", "fp64")
SHOWN = 6  # names in a sentence


class Tuned(Record, frozen=True, kw_only=True):
    """A configuration measured in the final rung."""

    name: str
    command: str
    batch_size: int
    step_seconds: Spread
    round_seconds_per_sample: list[float]
    data_seconds_per_sample: float = 0.0  # the wait for data between steps, which is not in a step
    samples_per_second: float | None
    speed_up: SpeedUp
    precision: str
    loss_difference: float | None
    verify: Verification | None
    peak_bytes: list[PeakMemory]
    exposed_seconds: float | None


class CurvePoint(Record, frozen=True, kw_only=True):
    """A bucket size (None means PyTorch's default), with all other options at their defaults."""

    bucket_mb: float | None
    buckets: float
    step_seconds: float
    exposed_seconds: float | None
    communication_seconds: float | None


class TuneResult(Record, frozen=True, kw_only=True):
    """What `tune --json` prints: the fastest configuration that trains like the default, and the
    fastest one in low precision if that is even faster.

    margin      how much faster `chosen` is than the best runner-up, in the same rounds
    runners_up  the other finalists that train like the default, the fastest first
    """

    kind: str
    devices: int | None = None  # how many each layout uses; None if only options were searched
    device_bytes: int | None = None  # the memory limit
    default: Tuned
    chosen: Tuned
    best_is_default: bool
    margin: SpeedUp | None = None
    runners_up: tuple[Tuned, ...] = ()
    low_precision: Tuned | None
    search: SearchNotes = SearchNotes()
    curve: list[CurvePoint]
    rungs: list[str]
    run_folder: str
    seconds: float | None = None
    report: str | None = None  # the path of the page, if one was written
    findings: tuple[Finding, ...] = ()  # the verdict in words


def choice_of(folder: Path) -> TuneResult:
    manifest = manifest_of(folder, TuneManifest)
    rungs = rungs_of(folder)
    final, path = comparison_of(rungs[-1]), folder / "search.json"
    default = next((row for row in final.rows if row.name == final.baseline), None)
    if default is None:
        problem = f"The search in {folder} did not measure the default configuration."
        raise UsageError(problem, fix="run paralab tune again")
    # If the default is lossy, its variants are lossy in the same way.
    lossy = is_lossy(default.request)
    proved = [row for row in final.rows if row.verify and row.verify.passed]
    sound = [row for row in proved if is_lossy(row.request) == lossy and row is not default]
    sound.append(default)
    sound.sort(key=lambda row: row.ratio.value, reverse=True)
    faster = [row for row in sound if row.ratio.verdict == "faster"]
    same = [row for row in sound if row.precision == default.precision]
    chosen = next((row for row in same if row in faster), default)
    others = [row for row in same if row is not chosen]
    low = next((row for row in faster if row.precision not in (*HIGH, default.precision)), None)
    return TuneResult(
        kind="tune",
        devices=manifest.devices,
        device_bytes=manifest.device_bytes,
        default=_tuned(default),
        chosen=_tuned(chosen),
        best_is_default=chosen is default,
        margin=_margin(chosen, others[0]) if others else None,
        runners_up=tuple(map(_tuned, others)),
        low_precision=_tuned(low) if low and low.ratio.value > chosen.ratio.value else None,
        curve=max(map(curve, rungs), key=len),
        rungs=[rung.name for rung in rungs],
        run_folder=str(folder),
        search=convert(read_object(path), SearchNotes, path) if path.exists() else SearchNotes(),
    )


def _margin(chosen: Row, other: Row) -> SpeedUp:
    return speed_up(other.round_seconds_per_sample, chosen.round_seconds_per_sample)


def rungs_of(folder: Path) -> list[Path]:
    """Return the rungs that were started."""
    manifests = sorted(folder.glob("rung*/manifest.json"))
    if not manifests:
        problem = f"The search in {folder} was stopped before it measured anything."
        raise UsageError(problem, fix="run paralab tune again")
    return [path.parent for path in manifests]


def _tuned(row: Row) -> Tuned:
    exposed = row.metrics.exposed_communication_seconds
    waits = row.metrics.data_seconds_between_steps / (row.samples_per_step or row.batch.size)
    more = {"exposed_seconds": exposed, "data_seconds_per_sample": waits}
    return Tuned.like(row, batch_size=row.batch.size, **more)


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
    measured = _measured_section(folder, choice.default.name)
    sections = [*_curve_sections(choice), measured, *_not_measured(choice)]
    rest = report(comparison_of(final), final, sections)
    general = [each for each in rest.findings if each.kind in ("same", "warning")]
    title = f"Tune: {manifest.workload.name}"
    return replace(rest, title=title, findings=(*findings(choice), *general))


def _measured_section(folder: Path, default: str) -> Section:
    rows = [
        {
            "phase": exact(number),
            "configuration": name(row.name),
            "rounds": exact(len(row.round_seconds)),
            "step time": measure(row.step_seconds.median, seconds),
            "samples/s": measure(row.samples_per_second, rate),
            "speed-up": measure(_over(default, row, rung), "{:.2f}".format),
            "memory": measure(largest_memory(row), size),
        }
        for number, path in enumerate(rungs_of(folder), 1)
        for rung in [comparison_of(path).rows]
        for row in rung
    ]
    note = (
        f"Speed-ups are relative to {default} in the same phase. Only the last phase is verified."
    )
    return Section("What the search measured", (table("", rows, note),))


def _over(default: str, row: Row, rung: list[Row]) -> float | None:
    """Return the speed-up over the default. The first phase ran before the default was chosen."""
    base = next((each for each in rung if each.name == default), None)
    if base is None:
        return None
    return speed_up(base.round_seconds_per_sample, row.round_seconds_per_sample).value


def _not_measured(choice: TuneResult) -> list[Section]:
    search = choice.search
    pruned = [
        {"configuration": name(each.name), "needs": measure(each.needed_bytes, size)}
        for each in search.pruned
    ]
    refused = [{"configuration": name(e.name), "reason": words(e.reason)} for e in search.left_out]
    tables = (
        table(f"Do not fit in {size(choice.device_bytes)}", pruned, "Estimated or measured."),
        table("Cannot run here", refused),
    )
    blocks = tuple(each for each in tables if each.rows)
    return [Section("What the search did not measure", blocks)] if blocks else []


def _curve_sections(choice: TuneResult) -> list[Section]:
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
        "Each size ran for a round or two; the final rounds pick the winner. Each small bucket adds a "
        "fixed cost. Large buckets leave no computation to hide the communication behind."
    )
    return [Section("Bucket size", (chart, table("", map(_curve_row, points), note)))]


def _curve_row(point: CurvePoint) -> Cells:
    mb = point.bucket_mb
    return {
        "bucket": Cell("25 MB, the first 1 MB (default)" if mb is None else f"{mb:g} MB", mb),
        "all-reduces": Cell(f"{point.buckets:g}", point.buckets),
        "step time": measure(point.step_seconds, seconds),
        "communication": measure(point.communication_seconds, seconds),
        "exposed": measure(point.exposed_seconds, seconds),
    }


def findings(choice: TuneResult) -> tuple[Finding, ...]:
    others = (*_runners_up(choice), *_low_precision(choice), *_unmeasured(choice))
    return (_fastest(choice), *others)


def _fastest(choice: TuneResult) -> Finding:
    default, chosen = choice.default, choice.chosen
    before, after = default.step_seconds.median, chosen.step_seconds.median
    evidence: Evidence = {"default_seconds": before, "chosen_seconds": after}
    if choice.best_is_default:
        text = (
            f"Keep `{default.name}` ({seconds(before)} per step): no configuration with identical "
            "training results was measurably faster."
        )
        return Finding("fastest", text, evidence)
    evidence["speed_up"] = chosen.speed_up.to_dict()
    faster = times_as_fast(chosen.speed_up)
    text = f"`{chosen.name}` takes {seconds(after)} per step, and the default {seconds(before)}: "
    if chosen.batch_size != default.batch_size:
        text = (
            f"`{chosen.name}` trains {_rate(chosen)}, and the default {_rate(default)}. A batch of "
            f"{chosen.batch_size} instead of {default.batch_size} samples changes training. In "
            "samples per second of step time: "
        )
    return Finding("fastest", f"{text}{faster}. Use: `{chosen.command}`", evidence)


def _runners_up(choice: TuneResult) -> Iterator[Finding]:
    if not choice.runners_up or choice.margin is None:
        return
    first, *rest = choice.runners_up
    margin, best = choice.margin, f"`{choice.chosen.name}`"
    second = f"the runner-up {_name_with_rate(first)}"
    text = f"{best} is {times_as_fast(margin)} as {second}"
    if margin.verdict == "no difference":
        text = f"{best} and {second} are equally fast ({interval(margin)})"
    elif margin.verdict != "faster":
        why = f"Too noisy ({interval(margin)})" if interval(margin) else "Too few rounds"
        text = f"{why} to tell {best} from {second}"
    text += f". Then: {', '.join(map(_name_with_rate, rest))}" if rest else ""
    names = [each.name for each in choice.runners_up]
    yield Finding("margin", f"{text}.", {"margin": margin.to_dict(), "runners_up": names})


def _low_precision(choice: TuneResult) -> Iterator[Finding]:
    low = choice.low_precision
    if low is None:
        return
    moved = low.loss_difference
    losses = (
        "are not finite" if moved is None else f"differ by up to {difference(moved, 0)} (relative)"
    )
    losses = (
        "its losses " + losses if low.batch_size == choice.default.batch_size else "other batches"
    )
    faster = f"In low precision, `{low.name}` is {times_as_fast(low.speed_up)}"
    text = f"{faster}; {losses}. Use: `{low.command}`"
    evidence: Evidence = {"speed_up": low.speed_up.to_dict(), "loss_difference": moved}
    yield Finding("next", text, evidence)


def _unmeasured(choice: TuneResult) -> Iterator[Finding]:
    search = choice.search
    if choice.device_bytes is not None:
        pruned, unknown = len(search.pruned), len(search.not_estimated)
        limit = f"{size(choice.device_bytes)} per device"
        text = f"All of {plural(search.considered, 'configuration')} fit in {limit}"
        if pruned:
            text = f"{pruned} of {search.considered} configurations "
            text += "does not fit" if pruned == 1 else "do not fit"
            text += f" in {limit}: {_list_names([each.name for each in search.pruned])}"
        text += f". The memory of {unknown} could not be estimated" if unknown else ""
        evidence: Evidence = {"pruned": pruned, "considered": search.considered}
        yield Finding("pruned", f"{text}.", evidence | {"not_estimated": unknown})
    if search.untried:
        text = f"--trials left {plural(search.untried, 'configuration')} untried."
        yield Finding("untried", text, {"untried": search.untried})
    if search.left_out:
        names = [each.name for each in search.left_out]
        text = f"{plural(len(names), 'configuration')} cannot run here: {_list_names(names)}."
        yield Finding("left out", text, {"left_out": names})


def _name_with_rate(each: Tuned) -> str:
    return f"`{each.name}` ({_rate(each)})"


def _rate(each: Tuned) -> str:
    """Return the rate of a median step and its wait for data. The rate of a whole run would include
    a first step that compiles."""
    own = statistics.median(each.round_seconds_per_sample) + each.data_seconds_per_sample
    return f"{rate(1 / own)} samples/s"


def _list_names(names: list[str]) -> str:
    """List the first names; the page lists all."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:SHOWN]) + more
