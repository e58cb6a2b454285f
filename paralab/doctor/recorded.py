"""A folder that paralab has made, as the run rules see it: one run, or the runs of a comparison,
with the numbers of `analyse`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paralab.analyse.compare import comparison_of, read_manifest
from paralab.analyse.recording import Recording
from paralab.analyse.result import result_of
from paralab.errors import UsageError
from paralab.record.reader import failures_of

Row = dict[str, Any]
FEWEST = 4  # measured steps: of fewer, one slow moment makes a straggler


@dataclass(frozen=True)
class Run:
    """One training: its events, and `result` as `paralab run --json` prints it."""

    name: str
    folder: Path
    recording: Recording
    result: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str | None = None) -> Run:
        recording = Recording.read(folder)
        return cls(name or recording.plan["strategy"], folder, recording, result_of(folder))

    @property
    def plan(self) -> dict[str, Any]:
        return self.recording.plan

    @property
    def metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = self.result["metrics"]
        return metrics

    @property
    def step_seconds(self) -> float:
        """0 where too few steps were measured to judge by: every share of it is then left out."""
        return (
            (self.result["step_seconds"]["median"] or 0.0)
            if self.metrics["steps_measured"] >= FEWEST
            else 0.0
        )

    @property
    def is_crowded(self) -> bool:
        """More compute threads than cores, on the fullest node."""
        nodes = len({rank.get("node", "") for rank in self.plan["ranks"]}) or 1
        threads = self.plan["threads_per_device"] * -(-len(self.result["grid"]["devices"]) // nodes)
        return bool(
            self.plan["device"] == "cpu" and threads > self.recording.manifest["machine"]["cores"]
        )

    @property
    def failures(self) -> list[dict[str, Any]]:
        return failures_of(self.folder)


@dataclass(frozen=True)
class Recorded:
    """`rows`: the set-ups of a comparison, empty for a run. `runs`: the run, or the first round of
    every set-up."""

    folder: Path
    runs: tuple[Run, ...]
    rows: tuple[Row, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Recorded:
        manifest = read_manifest(folder)
        if "plan" in manifest:
            return cls(folder, (Run.read(folder),))
        if "cases" not in manifest or manifest.get("kind") == "verify":
            raise UsageError(
                f"{folder} holds neither a run nor a comparison (kind {manifest.get('kind')}).",
                fix="a run folder in it",
            )
        rows = tuple(comparison_of(folder)["rows"])
        return cls(
            folder,
            tuple(Run.read(folder / row["runs"][0], row["name"]) for row in rows if row["runs"]),
            rows,
        )
