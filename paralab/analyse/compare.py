"""Compare the configurations in an experiment folder: step times and speed-ups."""

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import fields
from dataclasses import replace as replace_options
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from paralab.analyse.blocks import Finding
from paralab.analyse.confidence import SpeedUp, speed_up
from paralab.analyse.manifest import About, ExperimentManifest, LeftOut, Planned, manifest_of
from paralab.analyse.metric_types import Metrics
from paralab.analyse.metrics import RULE, mean_shares
from paralab.analyse.recording import Recording
from paralab.analyse.result import NOT_FASTER, Numbers, Result, Spread, result_of, spread
from paralab.analyse.verify import Verification
from paralab.errors import UsageError
from paralab.machine.host import Machine
from paralab.plan.plan import Plan, label
from paralab.plan.request import Request
from paralab.record.types import Record, convert, read_object
from paralab.workload.summary import Summary

R = TypeVar("R", bound=Record)


class Row(Numbers, frozen=True, kw_only=True):
    """One measured configuration, with all rounds combined. Per-step counts are for one rank."""

    name: str
    command: str
    request: Request
    accumulate: int
    devices: int
    processes: int
    step_seconds: Spread
    round_seconds: list[float]  # median step time in each round
    round_seconds_per_sample: list[float]
    all_reduces_per_step: float
    all_gathers_per_step: float
    reduce_scatters_per_step: float
    bytes_per_step: float
    not_finite_losses: int
    runs: list[str]
    verify: Verification | None  # None if its training was not verified
    speed_up: SpeedUp | None = None  # None if its workload is not the baseline's
    efficiency: float | None = None  # speed-up per device
    loss_difference: float | None = None  # largest relative difference from the baseline

    @property
    def ratio(self) -> SpeedUp:
        """The speed-up, for comparisons in which all configurations train the same workload."""
        assert self.speed_up is not None, self.name
        return self.speed_up


class FailedRow(Planned, frozen=True, kw_only=True):
    """A configuration that failed. `runs` lists the rounds it completed before the failure."""

    error: str


class Comparison(Record, frozen=True, kw_only=True):
    """A comparison of configurations. docs/metrics.md defines the numbers."""

    kind: str
    about: About
    workload: Summary
    machine: Machine
    packages: dict[str, str | None]
    command: list[str]
    rounds: int
    baseline: str | None
    rows: list[Row]
    failed: list[FailedRow]
    left_out: tuple[LeftOut, ...]
    run_folder: str
    seconds: float | None = None
    report: str | None = None  # the path of the page, if one was written
    findings: tuple[Finding, ...] = ()  # the verdict in words


class Measured(Planned, frozen=True, kw_only=True):
    """A planned configuration that ran. `runs` lists the run folders of its completed rounds."""

    error: str | None
    verify: Verification | None = None


class Outcome(Record, frozen=True, kw_only=True):
    configurations: list[Measured]
    rounds: int
    signal: int | None = None  # the signal that interrupted it


def comparison_of(folder: Path) -> Comparison:
    """Return the comparison that `compare --json` prints."""
    manifest, path = manifest_of(folder, ExperimentManifest), folder / "outcome.json"
    if path.exists():
        return _compare(folder, manifest, convert(read_object(path), Outcome, path))
    return _compare(folder, manifest, _salvage(folder, manifest.configurations))


def _salvage(folder: Path, planned: list[Planned]) -> Outcome:
    """Recover a killed experiment, using the rounds that all configurations completed."""

    def is_complete(run: str) -> bool:
        exists = (folder / run / "manifest.json").exists()
        return exists and Recording.read(folder / run).status == "completed"

    numbers = range(len(planned[0].runs))
    rounds = [n for n in numbers if all(is_complete(each.runs[n]) for each in planned)]
    error = None if rounds else "it was killed before its first round was complete"
    measured = [
        Measured.like(each, runs=[each.runs[n] for n in rounds], error=error) for each in planned
    ]
    return Outcome(configurations=measured, rounds=len(rounds))


def comparison_of_runs(folders: Sequence[Path]) -> Comparison:
    """Combine runs into a comparison. It has one round, so it has no confidence intervals."""
    manifests = [Recording.read(folder).manifest for folder in folders]
    workloads = list(dict.fromkeys(manifest.workload.name for manifest in manifests))
    if len(workloads) > 1:
        problem = f"These runs train different workloads: {', '.join(workloads)}."
        raise UsageError(problem, fix="pass runs that train the same workload")
    names = [label(manifest.plan) for manifest in manifests]
    places = [folder.name for folder in folders]
    if len(set(places)) < len(places):
        places = [str(folder) for folder in folders]
    recorded = {field.name for field in fields(Plan)} & {field.name for field in fields(Request)}
    measured = [
        Measured(
            name=f"{name} ({place})" if names.count(name) > 1 else name,
            command=shlex.join(["paralab", *manifest.command[1:]]),
            request=Request(**{field: getattr(manifest.plan, field) for field in recorded}),
            runs=[str(folder)],
            error=None,
        )
        for folder, place, manifest, name in zip(folders, places, manifests, names, strict=True)
    ]
    experiment = ExperimentManifest.like(manifests[0], kind="run", configurations=[])
    return _compare(Path(), experiment, Outcome(configurations=measured, rounds=1))


def _compare(folder: Path, manifest: ExperimentManifest, outcome: Outcome) -> Comparison:
    results = [
        [] if each.error else [result_of(folder / run) for run in each.runs]
        for each in outcome.configurations
    ]
    measured = [runs for runs in results if any(run.step_seconds for run in runs)]
    # A damaged run may have no steps. Drop its round from all configurations, because a speed-up
    # compares two runs in the same round.
    numbers = range(min(map(len, measured), default=0))
    rounds = [n for n in numbers if all(runs[n].step_seconds for runs in measured)]
    rows, failed = [], []
    for each, runs in zip(outcome.configurations, results, strict=True):
        if rounds and any(run.step_seconds for run in runs):
            complete = replace(each, runs=[each.runs[n] for n in rounds])
            rows.append(_row(folder, complete, [runs[n] for n in rounds]))
        else:
            status = f" ({runs[0].status})" if runs else ""
            error = each.error or f"no step finished{status}"
            failed.append(FailedRow.like(each, error=error, runs=each.runs if each.error else []))
    rows = [_with_break_even(row, rows) for row in rows]
    first = next((row for row in rows if row.strategy == "single"), rows[0] if rows else None)
    named = [row for row in rows if row.name == manifest.baseline]
    baseline = next(iter(named), None) if manifest.baseline else first
    return Comparison.like(
        manifest,
        rounds=len(rounds) or outcome.rounds,
        baseline=baseline.name if baseline else None,
        rows=[_against(row, baseline) for row in rows] if baseline else [],
        failed=failed,
        run_folder=str(folder),
    )


def _row(folder: Path, configuration: Measured, results: list[Result]) -> Row:
    """Combine the rounds of one configuration."""
    recordings = [Recording.read(folder / run) for run in configuration.runs]
    first = results[0]
    seconds = [step for recording in recordings for step in recording.step_seconds]
    # Damaged events lack steps that result.json still contains.
    damaged = len(results) == 1 and first.steps > len(recordings[0].steps)
    times = first.step_seconds if damaged or not seconds else spread(seconds)
    assert times is not None, configuration.name
    rounds = [(r.step_seconds.median, r.samples_per_step or 1.0) for r in results if r.step_seconds]
    devices = len(first.grid.devices)
    rate = _median_of([r.samples_per_second for r in results])
    return Row.like(
        first,
        **{name: configuration[name] for name in ("name", "command", "request", "runs", "verify")},
        total_seconds=_median_of([r.total_seconds for r in results]),
        samples_per_second=rate,
        samples_per_second_per_device=rate / devices if rate else None,
        peak_bytes=results[-1].peak_bytes,  # the same in all rounds
        metrics=_metrics(results),
        warnings=first.warnings[len(first.remarks) :],
        skipped_steps=sum(r.skipped_steps for r in results),
        accumulate=first.batch.accumulate,
        devices=devices,
        processes=len(first.ranks),
        step_seconds=times,
        round_seconds=[median for median, _ in rounds],
        round_seconds_per_sample=[median / samples for median, samples in rounds],
        not_finite_losses=sum(loss is None for r in results for loss in r.losses),
    )


def _with_break_even(row: Row, rows: list[Row]) -> Row:
    """Compare a compiled configuration with the same one without --compile."""
    made, request = row.compilation, replace_options(row.request, compile=None)
    eager = next((other for other in rows if other.request == request), None)
    if made is None or eager is None or made.extra_seconds is None:
        return row
    ratio = speed_up(eager.round_seconds_per_sample, row.round_seconds_per_sample)
    saved = eager.step_seconds.median - row.step_seconds.median
    unknown = None
    if ratio.verdict == "too noisy":
        unknown = "too noisy to tell whether a compiled step is faster"
    elif saved <= 0 or ratio.verdict in ("slower", "no difference"):
        unknown = NOT_FASTER
    more = replace(
        made,
        eager_step_seconds=eager.step_seconds.median,
        break_even_steps=None if unknown else math.ceil(max(0.0, made.extra_seconds) / saved),
        unknown=unknown,
    )
    return replace(row, compilation=more)


def _against(row: Row, baseline: Row) -> Row:
    if row.request.workload != baseline.request.workload:
        return row
    ratio = speed_up(baseline.round_seconds_per_sample, row.round_seconds_per_sample)
    same_batch = row.batch.size == baseline.batch.size
    return replace(
        row,
        speed_up=replace(ratio, verdict="baseline") if row is baseline else ratio,
        efficiency=ratio.value * baseline.devices / row.devices,
        loss_difference=loss_difference(row.losses, baseline.losses) if same_batch else None,
    )


def loss_difference(
    losses: Sequence[float | None], expected: Sequence[float | None]
) -> float | None:
    """Return the largest relative difference, or None if only this run has a loss that is not
    finite."""
    pairs = [(a, b) for a, b in zip(losses, expected, strict=False) if b]
    known = [abs(a - b) / abs(b) for a, b in pairs if a is not None]
    return max(known, default=None) if len(known) == len(pairs) else None


def _metrics(results: list[Result]) -> Metrics:
    """Return the medians over the rounds. Keep a straggler only if most rounds have it."""
    rounds = [result.metrics for result in results]
    medians = _medians(rounds)
    late = [each.straggler for each in rounds if each.straggler]
    most = statistics.mode(each.rank for each in late) if late else None
    same = [straggler for straggler in late if straggler.rank == most]
    straggler = _medians(same) if 2 * len(same) > len(rounds) else None
    share = medians.communication_share
    return replace(
        medians,
        shares=mean_shares([each.shares for each in rounds if each.shares]),
        keeps_rule=share < RULE if share else None,
        straggler=straggler,
    )


def _medians(values: Sequence[R]) -> R:
    """Return the median of each number, and the other fields of the first record."""
    first = values[0]
    fields = first.__struct_fields__
    return replace(first, **{name: _median_of([each[name] for each in values]) for name in fields})


def _median_of(values: Sequence[Any]) -> Any:
    """Return the median of numbers, record fields, or list items. None means unknown."""
    known = [value for value in values if value is not None]
    first = known[0] if known else None
    if isinstance(first, Record):
        return _medians(known)
    if isinstance(first, list):
        alike = [value for value in known if len(value) == len(first)]
        return [_median_of(items) for items in zip(*alike, strict=True)]
    if isinstance(first, bool) or not isinstance(first, int | float):
        return first
    return statistics.median_low(known) if isinstance(first, int) else statistics.median(known)
