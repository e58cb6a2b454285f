"""Numbers as parts of a sentence: how many times as fast and how sure that is, shares, lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paralab.analyse.uncertainty import Ratio
from paralab.units import measure, seconds, size


def factor(value: float) -> str:
    """`1.87`, `0.655`, `12.4`: three figures."""
    return f"{value:.3g}"


def interval(ratio: Ratio) -> str:
    """`(1.8–2.0)`; what a single round cannot tell is said."""
    if ratio.low is None or ratio.high is None:
        return "(one round: no interval)"
    return f"({factor(ratio.low)}–{factor(ratio.high)})"


def times_as_fast(ratio: Ratio) -> str:
    """`1.9 times as fast (1.8–2.0)`; `no measurable difference (0.97–1.04 times as fast)`."""
    if ratio.verdict == "no measurable difference":
        return f"no measurable difference: {factor(ratio.value)} times as fast {interval(ratio)}"
    return f"{factor(ratio.value)} times as fast {interval(ratio)}"


def faster(ratio: Ratio) -> bool | None:
    """Yes or no, where the rounds can tell; no measurable difference is no."""
    return None if ratio.low is None else ratio.verdict == "faster"


def reaches(ratio: Ratio, goal: float) -> bool | None:
    """Is the true ratio at least `goal`? None where the goal lies inside the interval, or there is none."""
    if ratio.low is None or ratio.high is None:
        return None
    return True if ratio.low >= goal else False if ratio.high < goal else None


def share(value: float | None) -> str:
    """`0.1288` -> `13 %`; below a tenth with one more figure."""
    if value is None:
        return "not measured"
    return f"{value:.0%}".replace("%", " %") if value >= 0.0995 or value == 0 else measure(value, "share")


def spread(times: dict[str, Any]) -> str:
    """`34.6 ms (p10–p90: 34.4 ms–35.0 ms)`."""
    return f"{seconds(times['median'])} (p10–p90: {seconds(times['p10'])}–{seconds(times['p90'])})"


def listed(words: Sequence[object], last: str = "and") -> str:
    """`a, b and c`."""
    told = [str(word) for word in words]
    return f" {last} ".join([", ".join(told[:-1]), told[-1]]) if len(told) > 1 else "".join(told)


def split_words(sizes: Sequence[int]) -> str:
    """`22/22/20`."""
    return "/".join(map(str, sizes))


def more_or_less(before: float, after: float, what: str = "") -> str:
    """Of sizes: `12.3 MiB less (16 %)`; `as much`."""
    if abs(after - before) < 0.005 * max(before, 1):
        return f"as much{what}"
    word = "more" if after > before else "less"
    return f"{size(abs(after - before))} {word}{what} ({share(abs(after - before) / before)})"
