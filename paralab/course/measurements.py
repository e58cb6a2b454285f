"""A practical's measurements by key, and the filters and functions that templates use to write
sentences about them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from paralab.analyse.compare import Comparison, Row
from paralab.analyse.confidence import Ratio, speed_up
from paralab.analyse.events_summary import EventsSummary, summarize
from paralab.analyse.metric_types import GradientCounts
from paralab.analyse.phrases import factor, listed, share, split_words
from paralab.analyse.recording import Recording
from paralab.course.configurations import KEYS, LABELS, find
from paralab.plan.remarks import find_sharing
from paralab.units import plural, seconds, size


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

    def notes(self, keys: Sequence[str], columns: Sequence[str] = ()) -> str:
        """Say what is virtual, emulated, or shared in these runs, and how memory was measured."""
        rows = [self.rows[key] for key in keys if key in self.rows]
        if not rows:
            return ""
        # Remarks that differ only in their numbers (2, 3, or 5 devices) appear once.
        remarks = {re.sub(r"\d+", "", each): each for row in rows for each in row.remarks}
        text = "; ".join(remarks.values())
        notes = [f"{text[:1].upper()}{text[1:]}."] if text else []
        if "memory" in columns:
            counted = rows[0].peak_bytes[0].how != "allocator"
            what = "the tensors' total size" if counted else "the allocator's peak"
            notes.append(f"Memory is {what}.")
        return " ".join(notes)


def sharing(row: Row) -> str:
    """Explain why more devices cannot be faster on this machine. Return an empty string if they
    can."""
    return find_sharing(row.remarks)


EQUALLY = 1.1  # loads within 10 % are considered equal


def arrived(row: Measured) -> list[int]:
    """Return the number of samples that arrived inside the model on each device. A hook counts
    them, so these are not planned values."""
    return [int(entry.shape[0]) for entry in row.splits]


def memories(row: Measured) -> list[int]:
    return [int(entry.bytes) for entry in row.peak_bytes]


def memory(row: Measured) -> int:
    return max(memories(row))


def busy_shares(row: Measured) -> list[float]:
    """Return the share of a step in which each device works, or the GPU utilization if NVML
    measured it."""
    gpu = [float(entry.utilization) for entry in row.metrics.load.gpu]
    if len(gpu) > 1:
        return gpu
    if row.strategy == "dp" and row.metrics.balance is None:
        return []  # the replicas run inside one nn.DataParallel call
    return [entry.share for entry in row.metrics.busy if entry.share is not None]


def why_no_load(row: Measured) -> str:
    if len(row.peak_bytes) < 2:
        return f"all replicas share {row.peak_bytes[0].device}"
    return "the replicas run inside one call of nn.DataParallel"


def copying(row: Measured, kind: str) -> float | None:
    return row.observed.copying.get(kind)


def copying_seconds(row: Measured) -> float:
    """Return the seconds that DataParallel spends on copies in one step, or 0 if torch makes the
    copies inside its calls."""
    return sum(row.observed.copying.values())


def fair(number: int, parts: int) -> list[int]:
    """64 over 3 -> 22, 21, 21."""
    return [number // parts + (place < number % parts) for place in range(parts)]


def micro_sizes(row: Measured) -> str:
    """Return the micro-batch sizes on rank 0: `8`, or `3/3/2` if they differ."""
    sizes = fair(row.ranks[0].samples_per_step, row.batch.micro_batches)
    return str(sizes[0]) if len(set(sizes)) == 1 else split_words(sizes)


def device_numbers(row: Measured) -> list[int]:
    """Return the device numbers, rank by rank: 0, 2, 1, 3 if rank 0 has `cuda:0` and `cuda:2`."""
    names = [device for rank in row.ranks for device in rank.devices]
    return [int(name.partition(":")[2] or 0) for name in names]


def gradients(row: Measured) -> GradientCounts:
    assert row.metrics.gradients, "each run counts the gradients in its first step"
    return row.metrics.gradients


def zero_share(row: Measured) -> float:
    found = gradients(row)
    return found.zeros / found.total


def bubble(row: Measured) -> float | None:
    return row.metrics.bubble.measured if row.metrics.bubble else None


def balance(row: Measured) -> float | None:
    shares = busy_shares(row)
    return max(shares) / max(min(shares), 1e-9) if len(shares) > 1 else None


def first_is_busier(row: Measured) -> bool | None:
    shares = busy_shares(row)
    if len(shares) < 2:
        return None
    return shares[0] >= EQUALLY * sum(shares[1:]) / len(shares[1:])


def first_is_bottleneck(row: Measured) -> bool:
    """Return whether the other ranks wait for rank 0. A busier device 0 alone is no proof: another
    program may share its core."""
    late = row.metrics.straggler
    return bool(late and int(late.rank) == 0)


def rank_losses(row: Measured) -> list[float]:
    """Return the mean loss over each rank's own samples in the first step."""
    parts = zip(row.observed.loss_parts, row.ranks, strict=True)
    return [part * row.batch.size / rank.samples_per_step for part, rank in parts]


def interval(speed: Ratio) -> str:
    """`95 % CI 1.80–1.95`."""
    if speed.low is None or speed.high is None:
        return "too few rounds for an interval"
    return f"95 % CI {factor(speed.low)}–{factor(speed.high)}"


def change(before: float, after: float) -> str:
    """`29 % less`, `the same`."""
    if abs(after - before) < 0.005 * before:
        return "the same"
    return f"{share(abs(after - before) / before)} {'more' if after > before else 'less'}"


def choose(speed: Ratio, faster: str, slower: str) -> str:
    """Return the name of the faster side, `neither` if both take the same time, or an empty string
    if the timings are too noisy to tell."""
    return speed.choose(faster, slower) or ("neither" if speed.is_faster is False else "")


def ceil_div(number: int, parts: int) -> int:
    return -(-number // parts)


def balanced(row: Measured) -> bool | None:
    found = balance(row)
    return None if found is None else found < EQUALLY


NAMED: Sequence[Callable[..., Any]] = (
    *(seconds, size, share, factor, interval, change, choose, ceil_div, fair, arrived),
    *(memory, memories, copying, copying_seconds, busy_shares, first_is_busier, balanced, sharing),
    *(first_is_bottleneck, why_no_load, micro_sizes, device_numbers, rank_losses),
    *(zero_share, bubble),
)
FILTERS: Mapping[str, Callable[..., Any]] = {
    **{each.__name__: each for each in NAMED},
    "count": lambda value: f"{value:,.0f}",
    "tiny": lambda value: f"{value:.0e}",
    "four_digits": lambda value: f"{value:.4f}",
    "plural": lambda value, noun: plural(int(value), noun),
    "listed": lambda values: listed(list(values)),
    "slashes": split_words,
    "unique_count": lambda values: len(set(values)),
    "alone_seconds": lambda row: copying_seconds(row) + (row.metrics.optimizer_seconds or 0.0),
    "own_devices": lambda row: len(set(row.ranks[0].devices)),
    "is_virtual": lambda row: bool(sharing(row)) or any(rank.virtual for rank in row.ranks),
    "loss_scale": lambda row: gradients(row).scale,
}


def _more_balanced(lab: Measurements, before: str, after: str) -> bool | None:
    values = [balance(lab.rows[key]) for key in (before, after)]
    return None if None in values else values[1] <= values[0]  # type: ignore[operator]


def _growth(lab: Measurements, keys: Sequence[str]) -> dict[str, float | None]:
    return {
        f"{kind}, {lab.rows[key].devices} devices": copying(lab.rows[key], kind)
        for key in keys
        if key in lab.rows
        for kind in ("replicate", "reduce")
    }


def _same_pattern(lab: Measurements, keys: Sequence[str]) -> bool:
    """Return whether all configurations run the same passes and all-reduces."""
    seen = {
        (row.observed.passes.forward, row.observed.passes.backward, row.all_reduces_per_step)
        for row in (lab.rows[key] for key in keys)
    }
    return len(seen) == 1


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
