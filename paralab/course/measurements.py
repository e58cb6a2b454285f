"""A practical's measurements by key, and the filters and functions for its template."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from paralab.analyse import phrases
from paralab.analyse.compare import Comparison, Row
from paralab.analyse.confidence import SpeedUp, speed_up
from paralab.analyse.events_summary import EventsSummary, summarize
from paralab.analyse.metric_types import GradientCounts
from paralab.analyse.phrases import capital, factor, listed, share, slashes
from paralab.analyse.recording import Recording
from paralab.course.configurations import KEYS, LABELS, find
from paralab.plan.batches import even_sizes
from paralab.plan.remarks import find_sharing
from paralab.units import difference, plural, seconds, size

EQUALLY = 1.1  # loads within 10% are considered equal


class Measured(Row, frozen=True, kw_only=True):
    """A practical's configuration, as seen by a template."""

    key: str
    observed: EventsSummary


@dataclass(frozen=True)
class Measurements:
    comparison: Comparison

    @cached_property
    def rows(self) -> dict[str, Measured]:
        """The configurations that completed training."""
        rows = {}
        for row in self.comparison.rows:
            key, last = KEYS[row.name], Path(self.comparison.run_folder, row.runs[-1])
            rows[key] = Measured(**asdict(row), key=key, observed=summarize(Recording.read(last)))
        return rows

    def why_not(self, key: str) -> str:
        """Explain why a configuration has no numbers."""
        reasons = {each.name: each.reason for each in self.comparison.left_out}
        reasons |= {each.name: f"it failed: {each.error}" for each in self.comparison.failed}
        return reasons.get(LABELS[key], "this run did not include it")

    def speed_up(self, before: str, after: str) -> SpeedUp:
        """Return the speed-up from `before` to `after`, using the rounds in which both ran."""
        return speed_up(self.rows[before].round_seconds, self.rows[after].round_seconds)

    def recordings(self, key: str) -> list[Recording]:
        runs = self.rows[key].runs if key in self.rows else []
        return [Recording.read(Path(self.comparison.run_folder, run)) for run in runs]

    def notes(self, keys: Sequence[str], columns: Sequence[str] = ()) -> str:
        """State what is virtual, emulated, or shared in these runs, and how memory was measured."""
        rows = [self.rows[key] for key in keys if key in self.rows]
        if not rows:
            return ""
        # Remarks that differ only in their numbers (2, 3, or 5 devices) appear once.
        remarks = {re.sub(r"\d+", "", each): each for row in rows for each in row.remarks}
        text = "; ".join(remarks.values())
        notes = [f"{capital(text)}."] if text else []
        if "memory" in columns:
            peak = rows[0].peak_bytes[0].how == "allocator"
            what = "the allocator's peak" if peak else "the tensors' total size"
            notes.append(f"Memory is {what}.")
        return " ".join(notes)


def arrived(row: Measured) -> list[int]:
    """Return how many samples reached the model on each device, counted by a hook."""
    return [entry.shape[0] for entry in row.splits]


def memories(row: Measured) -> list[int]:
    return [entry.bytes for entry in row.peak_bytes]


def memory(row: Measured) -> int:
    return max(memories(row))


def busy_shares(row: Measured) -> list[float]:
    """Return the share of a step for which each device is busy, or NVML's GPU utilization."""
    gpu = [entry.utilization for entry in row.metrics.load.gpu]
    if len(gpu) > 1:
        return gpu
    if row.strategy == "dp" and row.metrics.balance is None:
        return []  # the replicas run inside one nn.DataParallel call
    return [entry.share for entry in row.metrics.busy if entry.share is not None]


def why_no_load(row: Measured) -> str:
    if len(row.peak_bytes) < 2:
        return f"all replicas share {row.peak_bytes[0].device}"
    return "the replicas run inside one call to nn.DataParallel"


def copying_seconds(row: Measured) -> float:
    """Return the seconds spent on copies per step, or 0 if torch copies inside its own calls."""
    return sum(row.observed.copying.values())


def micro_sizes(row: Measured) -> str:
    """Return the micro-batch sizes on rank 0: `8`, or `3/3/2` if they differ."""
    sizes = even_sizes(row.ranks[0].samples_per_step, row.batch.micro_batches)
    return str(sizes[0]) if len(set(sizes)) == 1 else slashes(sizes)


def device_numbers(row: Measured) -> list[int]:
    """Return the device numbers, rank by rank: 0, 2, 1, 3 if rank 0 has `cuda:0` and `cuda:2`."""
    names = [device for rank in row.ranks for device in rank.devices]
    return [int(name.partition(":")[2] or 0) for name in names]


def gradients(row: Measured) -> GradientCounts:
    assert row.metrics.gradients, "each run counts the gradients in its first step"
    return row.metrics.gradients


def zero_share(row: Measured) -> float:
    return gradients(row).zeros / gradients(row).total


def bubble(row: Measured) -> float | None:
    return row.metrics.bubble.measured if row.metrics.bubble else None


def balance(row: Measured) -> float | None:
    """Return the largest load divided by the smallest, or None for fewer than two devices."""
    shares = busy_shares(row)
    return max(shares) / max(min(shares), 1e-9) if len(shares) > 1 else None


def balanced(row: Measured) -> bool | None:
    ratio = balance(row)
    return None if ratio is None else ratio < EQUALLY


def first_is_busier(row: Measured) -> bool | None:
    first, *others = busy_shares(row) or [0.0]
    return first >= EQUALLY * statistics.mean(others) if others else None


def first_is_bottleneck(row: Measured) -> bool:
    """Return whether the other ranks wait for rank 0. A busier device 0 is not enough: another
    program may be using its core."""
    late = row.metrics.straggler
    return late is not None and late.rank == 0


def rank_losses(row: Measured) -> list[float]:
    """Return the mean loss over each rank's own samples in the first step."""
    parts = zip(row.observed.loss_parts, row.ranks, strict=True)
    return [part * row.batch.size / rank.samples_per_step for part, rank in parts]


def interval(speed: SpeedUp) -> str:
    """`95% CI 1.80–1.95`."""
    limits = phrases.interval(speed)
    return f"95% CI {limits}" if limits else "too few rounds for an interval"


def change(before: float, after: float) -> str:
    """`29% less`, `the same`."""
    if abs(after - before) < 0.005 * before:
        return "the same"
    return f"{share(abs(after - before) / before)} {'more' if after > before else 'less'}"


def choose(speed: SpeedUp, faster: str, slower: str) -> str:
    """Return the faster side, `neither` if both are equal, or "" if the timings are too noisy."""
    sides = {"faster": faster, "slower": slower, "no difference": "neither"}
    return sides.get(speed.verdict, "")


NAMED: Sequence[Callable[..., Any]] = (
    *(seconds, size, share, factor, interval, change, choose, arrived, memory, memories),
    *(copying_seconds, busy_shares, first_is_busier, balanced, first_is_bottleneck, why_no_load),
    *(micro_sizes, device_numbers, rank_losses, zero_share, bubble, listed, slashes),
)
FILTERS: Mapping[str, Callable[..., Any]] = {
    **{each.__name__: each for each in NAMED},
    "count": "{:,.0f}".format,
    "tiny": lambda value: difference(value, 0),
    "four_digits": "{:.4f}".format,
    "plural": lambda value, noun: plural(int(value), noun),
    "unique_count": lambda values: len(set(values)),
    "ceil_div": lambda number, parts: -(-number // parts),
    "fair": even_sizes,
    "copying": lambda row, kind: row.observed.copying.get(kind),
    "alone_seconds": lambda row: copying_seconds(row) + (row.metrics.optimizer_seconds or 0.0),
    "own_devices": lambda row: len(set(row.ranks[0].devices)),
    "sharing": lambda row: find_sharing(row.remarks),
    "is_virtual": lambda row: bool(find_sharing(row.remarks)) or any(r.virtual for r in row.ranks),
    "loss_scale": lambda row: gradients(row).scale,
}


def _more_balanced(lab: Measurements, before: str, after: str) -> bool | None:
    old, new = (balance(lab.rows[key]) for key in (before, after))
    return None if old is None or new is None else new <= old


def _growth(lab: Measurements, keys: Sequence[str]) -> dict[str, float | None]:
    """Return how long the copies take for each number of devices."""
    return {
        f"{kind}, {row.devices} devices": row.observed.copying.get(kind)
        for row in (lab.rows[key] for key in keys if key in lab.rows)
        for kind in ("replicate", "reduce")
    }


def _same_pattern(lab: Measurements, keys: Sequence[str]) -> bool:
    """Return whether all configurations run the same passes and all-reduces."""
    rows = [lab.rows[key] for key in keys]
    return len({(row.observed.passes, row.all_reduces_per_step) for row in rows}) == 1


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "speed_up": Measurements.speed_up,
    "why_not": Measurements.why_not,
    "first_of": lambda lab, keys: next((lab.rows[key] for key in keys if key in lab.rows), None),
    "more_balanced": _more_balanced,
    "growth": _growth,
    "same_pattern": _same_pattern,
    "on_gpu": lambda lab: any(row.device == "cuda" for row in lab.rows.values()),
    "rounds": lambda lab: lab.comparison.rounds,
    "limit": lambda lab: find(lab.comparison.about.practical or "").limit,
}
