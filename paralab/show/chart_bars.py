"""Bars with error bars, and every measured value as a dot: one labelled row each, over one common axis."""

from __future__ import annotations

import math

from paralab.analyse.blocks import Bars, Distribution
from paralab.show.svg import Axis, axis, bottom_axis, element, known, label, nothing, picture, text, width_of
from paralab.units import measure

WIDTH = 620
ROW = 32  # px from one row to the next
GOLDEN = 0.6180339887  # multiples of it, modulo 1, spread dots evenly and the same in every render


def draw_bars(bars: Bars, name: str) -> str:
    """Horizontal bars from zero, the value at the end of the bar, a dashed line at the reference."""
    if not bars.bars:
        return nothing()
    words = [bar.text or measure(bar.value, bars.unit) for bar in bars.bars]
    left = _label_room([bar.label for bar in bars.bars])
    right = WIDTH - max(map(width_of, words)) - 14
    ends = known([end for bar in bars.bars for end in (bar.value, bar.low, bar.high)] + [bars.reference])
    x = axis(ends, bars.unit, left, max(right, left + 120), from_zero=True)
    top, bottom = 18, 18 + ROW * len(bars.bars)
    rows, zero = [], x.scale(0)
    for number, bar in enumerate(bars.bars):
        middle = top + ROW * (number + 0.5)
        rows.append(label(bar.label, left - 12, middle + 4.5, left - 12))
        if not known([bar.value]):
            rows.append(text(words[number], zero + 8, middle + 4.5, "unknown"))
            continue
        assert bar.value is not None
        end = x.scale(bar.value)
        shape = {"x": min(zero, end), "y": middle - 10, "width": abs(end - zero), "height": 20}
        rows.append(element("rect", class_="bar", rx=2, **shape))
        if known([bar.low]) and known([bar.high]):
            assert bar.low is not None
            assert bar.high is not None
            rows.append(_error_bar(x.scale(bar.low), x.scale(bar.high), middle))
            end = max(end, x.scale(bar.high))
        rows.append(text(words[number], max(end, zero) + 9, middle + 4.5, "value"))
    if bars.reference is not None:
        at = x.scale(bars.reference)
        rows.append(element("line", class_="reference", x1=at, x2=at, y1=top - 4, y2=bottom))
        rows.append(text(measure(bars.reference, bars.unit), at, top - 7, "tick", "middle"))
    told = "; ".join(f"{bar.label}: {word}" + _range(bar.low, bar.high, bars.unit) for bar, word in zip(bars.bars, words, strict=True))
    return picture(name, bars.title, told, WIDTH, bottom + 40, bottom_axis(x, top, bottom), *rows)


def _error_bar(low: float, high: float, middle: float) -> str:
    path = f"M{low:.1f} {middle - 5:.1f}v10M{low:.1f} {middle:.1f}H{high:.1f}M{high:.1f} {middle - 5:.1f}v10"
    return element("path", class_="error-bar", d=path)


def _range(low: float | None, high: float | None, unit: str) -> str:
    return "" if low is None or high is None else f" (from {measure(low, unit)} to {measure(high, unit)})"


def draw_distribution(distribution: Distribution, name: str) -> str:
    """Dots, a box from quartile to quartile, a bar at the median."""
    values = [known(group.values) for group in distribution.groups]
    if not any(values):
        return nothing()
    left = _label_room([group.label for group in distribution.groups])
    unit = distribution.unit
    x = axis([value for group in values for value in group], unit, left, WIDTH - 96, from_zero=False)
    top, bottom, row = 6, 6 + 44 * len(values), 44
    rows, told = [], []
    for number, group in enumerate(distribution.groups):
        middle = top + row * (number + 0.5)
        rows.append(label(group.label, left - 12, middle + 4.5, left - 12))
        found = sorted(values[number])
        if not found:
            rows.append(text("not measured", left + 8, middle + 4.5, "unknown"))
            told.append(f"{group.label}: not measured")
            continue
        median = quantile(found, 0.5)
        rows.append(_dots(known(group.values), x, middle) + _quartiles(found, x, middle))
        rows.append(text(measure(median, unit), WIDTH - 4, middle + 4.5, "value", "end"))
        quartiles = f"quartiles {measure(quantile(found, 0.25), unit)} and {measure(quantile(found, 0.75), unit)}"
        told.append(f"{group.label}: median {measure(median, unit)}, {quartiles}, {len(found)} values")
    return picture(name, distribution.title, "; ".join(told), WIDTH, bottom + 40, bottom_axis(x, top, bottom), *rows)


def quantile(ordered: list[float], share: float) -> float:
    """Between the two nearest of the ordered values: the quartiles of 1 2 3 4 5 are 2, 3 and 4."""
    place = share * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def _dots(values: list[float], x: Axis, middle: float) -> str:
    """Moved up and down so that equal values do not hide each other; the height means nothing."""
    shifts = ((n * GOLDEN % 1 - 0.5) * 22 for n in range(len(values)))
    dots = (f"M{x.scale(value):.1f} {middle + shift:.1f}h0" for value, shift in zip(values, shifts, strict=True))
    return element("path", class_="dots", d="".join(dots))


def _quartiles(ordered: list[float], x: Axis, middle: float) -> str:
    first, median, third = (x.scale(quantile(ordered, share)) for share in (0.25, 0.5, 0.75))
    box = element("rect", class_="quartiles", x=first, y=middle - 15, width=third - first, height=30, rx=2)
    return box + element("line", class_="median", x1=median, x2=median, y1=middle - 17, y2=middle + 17)


def _label_room(labels: list[str]) -> float:
    return min(max(map(width_of, labels), default=0) + 18, 190)
