"""A recorded run, or the runs of a comparison, with the numbers that `analyse` computes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Self

from paralab.analyse.compare import FailedRow, Row, comparison_of
from paralab.analyse.manifest import kind_of
from paralab.analyse.metric_types import Bucket, Metrics
from paralab.analyse.recording import Recording
from paralab.analyse.result import Result, result_of
from paralab.doctor.registry import Check, Finding, check
from paralab.errors import UsageError
from paralab.plan.plan import Plan
from paralab.record.reader import Failure, read_failures

FEWEST = 4  # measured steps required: with fewer, one slow step looks like a straggler


@dataclass(frozen=True)
class Run:
    """One run: its events, and `result` as `paralab run --json` prints it."""

    name: str
    folder: Path
    recording: Recording
    result: Result

    @classmethod
    def read(cls, folder: Path, name: str | None = None) -> Self:
        recording = Recording.read(folder)
        return cls(name or recording.plan.strategy, folder, recording, result_of(folder))

    @property
    def plan(self) -> Plan:
        return self.recording.plan

    @property
    def metrics(self) -> Metrics:
        return self.result.metrics

    @property
    def step_seconds(self) -> float:
        """Return the step time, or 0 if too few steps were measured to compute shares of it."""
        times = self.result.step_seconds
        return times.median if times and self.metrics.steps_measured >= FEWEST else 0.0

    @property
    def cores(self) -> int:
        return self.recording.manifest.machine.cores

    @property
    def devices_per_node(self) -> int:
        nodes = len({rank.node for rank in self.plan.ranks}) or 1
        return -(-len(self.result.grid.devices) // nodes)

    @property
    def is_crowded(self) -> bool:
        """Return whether the busiest node has more compute threads than cores."""
        threads = self.plan.threads_per_device * self.devices_per_node
        return self.plan.device == "cpu" and threads > self.cores

    @property
    def last_buckets(self) -> list[Bucket]:
        """Return the buckets of one synchronization: those of the last backward pass."""
        buckets = [bucket for bucket in self.metrics.buckets if bucket.kind == "all_reduce"]
        return list({(bucket.stage, bucket.bucket): bucket for bucket in buckets}.values())

    @property
    def failures(self) -> list[Failure]:
        return read_failures(self.folder)


@dataclass(frozen=True)
class Recorded:
    """A run folder. `rows` holds the configurations of a comparison, and is empty for a run. `runs`
    holds the run, or the first round of every configuration."""

    folder: Path
    runs: tuple[Run, ...]
    rows: tuple[Row, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Self:
        kind = kind_of(folder)
        if kind == "run":
            return cls(folder, (Run.read(folder),))
        if kind not in ("compare", "scale", "practical"):
            raise UsageError(
                f"{folder} contains neither a run nor a comparison (kind {kind}).",
                fix="a run folder in it",
            )
        comparison = comparison_of(folder)
        measured: list[Row | FailedRow] = [*comparison.rows, *comparison.failed]
        runs = [Run.read(folder / row.runs[0], row.name) for row in measured if row.runs]
        return cls(folder, tuple(runs), tuple(comparison.rows))


def check_each_run(*ids: str) -> Callable[[Callable[[Run], Finding | None]], Check]:
    """Register a check of one run. Its finding points to the run's folder."""

    def register(find: Callable[[Run], Finding | None]) -> Check:
        @wraps(find)
        def check_runs(recorded: Recorded) -> list[Finding]:
            found = [(find(run), str(run.folder)) for run in recorded.runs]
            return [replace(finding, file=folder) for finding, folder in found if finding]

        return check(*ids, source="run")(check_runs)

    return register
