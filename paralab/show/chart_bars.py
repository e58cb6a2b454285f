"""Draw bars with error bars, and distributions with a dot per measured value. Each has one labeled
row, on a common axis.

Labels go to the left of the rows, or above them if there is little room.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from paralab.analyse.blocks import Bar, Bars, Distribution
from paralab.show.svg import (
    NARROW,
    Axis,
    axis,
    bottom_axis,
    element,
    known,
    label,
    nothing,
    picture,
    text,
    width_of,
)
from paralab.units import measure

GOLDEN = 0.6180339887  # multiples modulo 1 spread dots evenly and deterministically


@dataclass(frozen=True)
class Rows:
    """The row layout of a chart. Labels end at `left`; the numbers on the right start at
    `right`."""

    labels: list[str]
    width: int
    top: float
    height: float  # row height, without the label above it
    above: float  # px reserved for a label above a row
    left: float
    right: float

    def middle(self, number: int) -> float:
        return self.top + (self.above + self.height) * number + self.above + self.height / 2

    @property
    def bottom(self) -> float:
        return self.top + (self.above + self.height) * len(self.labels)

    def draw_label(self, number: int) -> str:
        if self.above:
            return label(
                self.labels[number],
                0,
                self.middle(number) - self.height / 2 - 2,
                self.width,
                "start",
            )
        return label(self.labels[number], self.left - 12, self.middle(number) + 4.5, self.left - 12)


def rows(labels: list[str], width: int, top: float, height: float, numbers: list[str]) -> Rows:
    """Lay out the rows. `numbers` are printed to the right of the rows, in bold."""
    right = width - max((width_of(words, bold=True) for words in numbers), default=0) - 16
    if width == NARROW:
        return Rows(labels, width, top, height - 4, above=20, left=6, right=right)
    left = min(max(map(width_of, labels), default=0) + 18, 0.35 * width)
    return Rows(labels, width, top, height, above=0, left=left, right=max(right, left + 120))


def draw_bars(bars: Bars, name: str, width: int) -> str:
    """Draw horizontal bars from zero, with the value at the end of each bar and a dashed reference
    line."""
    if not bars.bars:
        return nothing()
    words = [bar.text or measure(bar.value, bars.unit) for bar in bars.bars]
    shape = rows([bar.label for bar in bars.bars], width, 20, 32, words)
    ends = known(
        [end for bar in bars.bars for end in (bar.value, bar.low, bar.high)] + [bars.reference]
    )
    x = axis(ends, bars.unit, shape.left, shape.right, from_zero=True, about=width // 110)
    drawn = []
    if bars.reference is not None:
        at = x.scale(bars.reference)
        drawn.append(
            element("line", class_="reference", x1=at, x2=at, y1=shape.top - 4, y2=shape.bottom)
        )
        drawn.append(text(measure(bars.reference, bars.unit), at, shape.top - 8, "tick", "middle"))
    for number, bar in enumerate(bars.bars):
        drawn += [shape.draw_label(number), _bar(bar, words[number], x, shape.middle(number))]
    told = "; ".join(
        f"{bar.label}: {word}" + _range(bar.low, bar.high, bars.unit)
        for bar, word in zip(bars.bars, words, strict=True)
    )
    return picture(
        name,
        bars.title,
        told,
        width,
        shape.bottom + 26,
        bottom_axis(x, shape.top, shape.bottom),
        *drawn,
    )


def _bar(bar: Bar, words: str, x: Axis, middle: float) -> str:
    zero = x.scale(0)
    if bar.value is None or not known([bar.value]):
        return text(words, zero + 8, middle + 4.5, "unknown")
    end = x.scale(bar.value)
    drawn = element(
        "rect",
        class_="bar",
        x=min(zero, end),
        y=middle - 10,
        width=abs(end - zero),
        height=20,
        rx=2,
    )
    if bar.low is not None and bar.high is not None and len(known([bar.low, bar.high])) == 2:
        low, high = x.scale(bar.low), x.scale(bar.high)
        path = f"M{low:.1f} {middle - 5:.1f}v10M{low:.1f} {middle:.1f}H{high:.1f}M{high:.1f} {middle - 5:.1f}v10"
        drawn += element("path", class_="error-bar", d=path)
        end = max(end, high)
    return drawn + text(words, max(end, zero) + 9, middle + 4.5, "value")


def _range(low: float | None, high: float | None, unit: str) -> str:
    return (
        ""
        if low is None or high is None
        else f" (from {measure(low, unit)} to {measure(high, unit)})"
    )


def draw_distribution(distribution: Distribution, name: str, width: int) -> str:
    """Draw dots, a box from the first to the third quartile, and a bar at the median."""
    values = [known(group.values) for group in distribution.groups]
    if not any(values):
        return nothing()
    unit = distribution.unit
    medians = [measure(statistics.median(found), unit) if found else "" for found in values]
    shape = rows(
        [group.label for group in distribution.groups], width, 20, 40, ["median", *medians]
    )
    x = axis(
        [value for group in values for value in group],
        unit,
        shape.left,
        shape.right,
        from_zero=False,
        about=width // 110,
    )
    drawn, told = [text("median", width - 2, 12, "tick", "end")], []
    for number, group in enumerate(distribution.groups):
        middle, found = shape.middle(number), values[number]
        drawn.append(shape.draw_label(number))
        if not found:
            drawn.append(text("not measured", shape.left + 8, middle + 4.5, "unknown"))
            told.append(f"{group.label}: not measured")
            continue
        drawn.append(
            _draw_quartiles(found, x, middle)
            + _dots(values[number], x, middle)
            + _draw_median(found, x, middle)
        )
        drawn.append(text(medians[number], width - 2, middle + 4.5, "value", "end"))
        first, _, third = (measure(value, unit) for value in quartiles(found))
        spread = f"quartiles {first} and {third}"
        told.append(f"{group.label}: median {medians[number]}, {spread}, {len(found)} values")
    grid = bottom_axis(x, shape.top, shape.bottom)
    return picture(
        name, distribution.title, "; ".join(told), width, shape.bottom + 26, grid, *drawn
    )


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the first quartile, median, and third quartile, interpolated. For 1 2 3 4 5, they are
    2, 3, and 4."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def _dots(values: list[float], x: Axis, middle: float) -> str:
    """Draw dots, spread vertically so equal values do not hide each other. The height has no
    meaning."""
    shifts = ((n * GOLDEN % 1 - 0.5) * 22 for n in range(len(values)))
    dots = (
        f"M{x.scale(value):.1f} {middle + shift:.1f}h0"
        for value, shift in zip(values, shifts, strict=True)
    )
    return element("path", class_="dots", d="".join(dots))


def _draw_quartiles(values: list[float], x: Axis, middle: float) -> str:
    first, _, third = (x.scale(value) for value in quartiles(values))
    return element(
        "rect", class_="quartiles", x=first, y=middle - 15, width=third - first, height=30, rx=2
    )


def _draw_median(values: list[float], x: Axis, middle: float) -> str:
    at = x.scale(statistics.median(values))
    return element("line", class_="median", x1=at, x2=at, y1=middle - 17, y2=middle + 17)
