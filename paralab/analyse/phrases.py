"""Numbers as parts of a sentence: how many times as fast and how sure that is, shares, lists."""

from __future__ import annotations

from collections.abc import Sequence

from paralab.analyse.compare import Comparison, Row
from paralab.analyse.confidence import Ratio
from paralab.analyse.result import Result, Spread
from paralab.units import plural, seconds, size

NOTICEABLE = 1.05  # an interval that ends below this means: not noticeably faster
SAME_SIZE = 0.005


def machine_words(comparison: Comparison) -> str:
    """What the rows were trained on: `1 GPU (NVIDIA H200)`, `2 cores of AMD EPYC`, or both."""
    machine, used = comparison.machine, {row.device for row in comparison.rows}
    words = []
    if machine.gpus and (used & {"cuda", "auto"} or not used):
        words.append(f"{plural(len(machine.gpus), 'GPU')} ({machine.gpus[0].name})")
    if "cpu" in used or not words:
        words.append(f"{plural(machine.cores, 'core')} of {machine.cpu}")
    return " and ".join(words)


def factor(value: float) -> str:
    """`1.87`, `0.66`, `0.057`."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def interval(ratio: Ratio) -> str:
    """`(1.80–1.95)`, or that there were too few rounds."""
    if ratio.low is None or ratio.high is None:
        return "(too few rounds for an interval)"
    return f"({factor(ratio.low)}–{factor(ratio.high)})"


def speed(subject: str, ratio: Ratio) -> str:
    """`DDP is 1.93 times as fast (1.88–1.99)`; `DDP makes no measurable difference: 1.01 times as
    fast (0.97–1.04)`."""
    verb = (
        "makes no measurable difference:" if ratio.verdict == "no measurable difference" else "is"
    )
    return f"{subject} {verb} {factor(ratio.value)} times as fast {interval(ratio)}"


def faster(ratio: Ratio) -> bool | None:
    """True or False if the rounds are sufficient to tell, else None."""
    if ratio.low is None or ratio.high is None:
        return None
    if ratio.verdict == "faster":
        return True
    return False if ratio.verdict == "slower" or ratio.high < NOTICEABLE else None


def reaches(ratio: Ratio, goal: float) -> bool | None:
    """Whether the true ratio is at least `goal`. None if the goal is inside the interval, or there
    is none."""
    if ratio.low is None or ratio.high is None:
        return None
    return True if ratio.low >= goal else False if ratio.high < goal else None


def share(value: float | None) -> str:
    """`0.1288` -> `13 %`, `0.0661` -> `6.6 %`."""
    if value is None:
        return "not measured"
    return f"{value * 100:.0f} %" if value >= 0.0995 or value == 0 else f"{value * 100:.2g} %"


def collectives_per_step(row: Row | Result) -> str:
    """`2 all-reduces`; with shards `7 all-gathers and 4 reduce-scatters`; empty with one
    process."""
    counts = {
        "all-reduce": row.all_reduces_per_step,
        "all-gather": row.all_gathers_per_step,
        "reduce-scatter": row.reduce_scatters_per_step,
    }
    return " and ".join(
        f"{count:g} {name}" + ("" if count == 1 else "s") for name, count in counts.items() if count
    )


def spread(times: Spread) -> str:
    """`34.6 ms (p10–p90: 34.4 ms–35.0 ms)`."""
    return f"{seconds(times.median)} (p10–p90: {seconds(times.p10)}–{seconds(times.p90)})"


def listed(words: Sequence[object], last: str = "and") -> str:
    """`a, b and c`."""
    *head, tail = [str(word) for word in words] or [""]
    return f"{', '.join(head)} {last} {tail}" if head else tail


def alike(words: Sequence[object]) -> str:
    """`4` if all are equal, else `4, 4 and 8`."""
    return str(words[0]) if len(set(map(str, words))) == 1 else listed(words)


def split_words(sizes: Sequence[int]) -> str:
    """`22/22/20`."""
    return "/".join(map(str, sizes))


def often(times: int) -> str:
    return {1: "once", 2: "twice"}.get(times, f"{times} times")


def more_or_less(before: float, after: float) -> str:
    """Compares sizes: `12.3 MiB less, 16 %`, or `as much`."""
    if abs(after - before) < SAME_SIZE * before:
        return "as much"
    change = abs(after - before)
    direction = "more" if after > before else "less"
    return f"{size(change)} {direction}, {share(change / before)}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
