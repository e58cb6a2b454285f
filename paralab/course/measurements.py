"""Provide a practical's measurements by key, together with an event summary from the last round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from msgspec.structs import asdict

from paralab.analyse.compare import Comparison, Row
from paralab.analyse.confidence import Ratio, speed_up
from paralab.analyse.events_summary import EventsSummary, summarize
from paralab.analyse.recording import Recording
from paralab.course.configurations import KEYS, LABELS
from paralab.plan.remarks import find_sharing


class Measured(Row, frozen=True, kw_only=True):
    """A practical's configuration, as seen by a template."""

    key: str
    observed: EventsSummary


@dataclass(frozen=True)
class Measurements:
    comparison: Comparison
    folder: Path

    @cached_property
    def rows(self) -> dict[str, Measured]:
        """The configurations that completed training."""
        found = {}
        for row in self.comparison.rows:
            key = KEYS[row.name]
            summary = summarize(Recording.read(self.folder / row.runs[-1]))
            found[key] = Measured(**asdict(row), key=key, observed=summary)
        return found

    def why_not(self, key: str) -> str:
        """Explain why a configuration has no numbers."""
        reasons = {each.name: each.reason for each in self.comparison.left_out}
        reasons |= {each.name: f"it failed: {each.error}" for each in self.comparison.failed}
        return reasons.get(LABELS[key], "this run did not include it")

    def speed_up(self, before: str, after: str) -> Ratio:
        """Return the speed-up from `before` to `after`, using the rounds in which both ran."""
        return speed_up(self.rows[before].round_seconds, self.rows[after].round_seconds)

    def recordings(self, key: str) -> list[Recording]:
        runs = self.rows[key].runs if key in self.rows else []
        return [Recording.read(self.folder / run) for run in runs]

    def notes(self, keys: Sequence[str]) -> str:
        """Note what is virtual, emulated, or shared in these runs, and how memory was counted."""
        rows = [self.rows[key] for key in keys if key in self.rows]
        if not rows:
            return ""
        remarks = dict.fromkeys(remark for row in rows for remark in row.remarks)
        counted = rows[0].peak_bytes[0].how != "allocator"
        memory = "memory is counted from tensors" if counted else "memory is the allocator's peak"
        text = "; ".join([*remarks, memory])
        return text[:1].upper() + text[1:] + "."

    @property
    def on_gpu(self) -> bool:
        return any(row.device == "cuda" for row in self.rows.values())


def sharing(row: Row) -> str:
    """Explain why more devices cannot be faster on this machine. Return an empty string if they
    can."""
    return find_sharing(row.remarks)
