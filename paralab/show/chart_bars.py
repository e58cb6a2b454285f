"""Draw bars with error bars, or distributions, on one axis: one per labeled row."""

import statistics
from collections.abc import Iterable

from paralab.analyse.blocks import Bar, Bars, Distribution
from paralab.analyse.recording import quantiles
from paralab.show import svg
from paralab.show.svg import Axis
from paralab.units import measure, plural

GOLDEN = 0.6180339887  # its multiples, modulo 1, spread dots evenly and reproducibly


class Rows:
    """The row layout of a chart. Labels are to the left of the rows and `numbers`, in bold, to
    their right. If there is little room, both are above the rows."""

    def __init__(
        self, labels: list[str], width: int, top: float, height: float, numbers: Iterable[str] = ()
    ) -> None:
        self.labels, self.width, self.top = labels, width, top
        self.numbers = list(numbers)
        self.above = 20 if width == svg.NARROW else 0  # px for a label above its row
        if self.above:
            self.numbers = list(map(self._shorten, labels, self.numbers))
        self.height = height - 4 if self.above else height
        # Without numbers, the last tick's label still needs room.
        self.left, self.right = 6.0, width - (16.0 if self.numbers else 28.0)
        if not self.above:
            widths = (svg.width_of(words, bold=True) for words in self.numbers)
            self.right -= max(widths, default=0)
            self.left = min(max(map(svg.width_of, labels), default=0) + 18, 0.4 * width)
            self.right = max(self.right, self.left + 120)

    def _shorten(self, label: str, number: str) -> str:
        """`0.74×, too few rounds` -> `0.74×` if the label needs the room. The table has the full
        text."""
        room = self.width - svg.width_of(label) - 8
        return number if svg.width_of(number, bold=True) <= room else number.partition(",")[0]

    def middle(self, number: int) -> float:
        return self.top + (self.above + self.height) * number + self.above + self.height / 2

    @property
    def bottom(self) -> float:
        return self.top + (self.above + self.height) * len(self.labels)

    def draw_label(self, number: int) -> str:
        words, middle = self.labels[number], self.middle(number)
        if self.above:
            beside = self.numbers[number] if number < len(self.numbers) else ""
            room = self.width - svg.width_of(beside, bold=True) - 8
            return svg.label(words, 0, middle - self.height / 2 - 2, room, "start")
        return svg.label(words, self.left - 12, middle + 4.5, self.left - 12)

    def draw_number(self, number: int, x: float, anchor: str | None = None) -> str:
        """Draw a row's number at `x`, or above the row if there is little room."""
        words, middle = self.numbers[number], self.middle(number)
        if self.above:
            place = middle - self.height / 2 - 2
            return svg.text(words, self.width - 2, place, "value", "end")
        return svg.text(words, x, middle + 4.5, "value", anchor)

    def axis(self, values: list[float], unit: str, from_zero: bool) -> Axis:
        return svg.axis(values, unit, (self.left, self.right), from_zero, about=self.width // 110)

    def picture(self, name: str, title: str, description: str, x: Axis, *content: str) -> str:
        """Create the chart: the rows, and the axis below them."""
        grid = svg.bottom_axis(x, self.top, self.bottom, width=self.width)
        return svg.picture(name, title, description, (self.width, self.bottom + 26), grid, *content)


def draw_bars(bars: Bars, name: str, width: int) -> str:
    """Draw bars that start at zero, their values, and a dashed reference line."""
    if not bars.bars:
        return svg.nothing()
    words = [bar.text or measure(bar.value, bars.unit) for bar in bars.bars]
    rows = Rows([bar.label for bar in bars.bars], width, 20, 32, words)
    ends = [end for bar in bars.bars for end in (bar.value, bar.low, bar.high)]
    x = rows.axis(svg.finite([*ends, bars.reference]), bars.unit, from_zero=True)

    drawn, described = [], []
    if bars.reference is not None:
        drawn += _reference(measure(bars.reference, bars.unit), x(bars.reference), rows)
    for number, bar in enumerate(bars.bars):
        drawn += [rows.draw_label(number), _bar(bar, number, x, rows)]
        low, high = (measure(end, bars.unit) for end in (bar.low, bar.high))
        interval = "" if None in (bar.low, bar.high) else f" (from {low} to {high})"
        described.append(f"{bar.label}: {words[number]}{interval}")
    return rows.picture(name, bars.title, "; ".join(described), x, *drawn)


def _reference(words: str, at: float, rows: Rows) -> list[str]:
    """Draw a dashed line, but not through the labels and numbers above the bars."""
    middles = [rows.middle(number) for number in range(len(rows.labels))]
    ends = [(rows.top - 4, rows.bottom)]
    if rows.above:
        ends = [(middle - rows.height / 2, middle + rows.height / 2) for middle in middles]
    half = svg.width_of(words) / 2
    inside = min(at, rows.width - half)
    label = svg.text(words, inside, rows.top - 8, "tick", "middle")
    return [label, *(svg.line("reference", at, top, at, bottom) for top, bottom in ends)]


def _bar(bar: Bar, number: int, x: Axis, rows: Rows) -> str:
    zero, middle = x(0), rows.middle(number)
    if bar.value is None or not svg.finite([bar.value]):
        return svg.text(rows.numbers[number], zero + 8, middle + 4.5, "unknown")
    end = x(bar.value)
    drawn = svg.rect("bar", min(zero, end), middle - 10, abs(end - zero), 20)
    ends = svg.finite([bar.low, bar.high])
    if len(ends) == 2:
        low, high = map(x, ends)
        left, right = (f"M{at:.1f} {middle - 5:.1f}v10" for at in (low, high))
        drawn += svg.path("error-bar", f"{left}M{low:.1f} {middle:.1f}H{high:.1f}{right}")
        end = max(end, high)
    return drawn + rows.draw_number(number, max(end, zero) + 9)


def draw_distribution(distribution: Distribution, name: str, width: int) -> str:
    """Draw dots, a box from the first to the third quartile, and a bar at the median."""
    values = [svg.finite(group.values) for group in distribution.groups]
    if not any(values):
        return svg.nothing()
    unit = distribution.unit
    medians = [measure(statistics.median(found), unit) if found else "" for found in values]
    labels = [group.label for group in distribution.groups]
    rows = Rows(labels, width, 20, 40, [*medians, "median"])
    x = rows.axis([value for group in values for value in group], unit, from_zero=False)

    drawn, described = [svg.text("median", width - 2, 12, "tick", "end")], []
    for number, found in enumerate(values):
        middle = rows.middle(number)
        drawn.append(rows.draw_label(number))
        if not found:
            drawn.append(svg.text("not measured", rows.left + 8, middle + 4.5, "unknown"))
            described.append(f"{labels[number]}: not measured")
            continue
        drawn.append(_draw_values(found, x, middle))
        drawn.append(rows.draw_number(number, width - 2, "end"))
        first, median, third = (measure(value, unit) for value in quantiles(found, 4))
        number_of = plural(len(found), "value")
        spread = f"median {median}, quartiles {first} and {third}, {number_of}"
        described.append(f"{labels[number]}: {spread}")
    return rows.picture(name, distribution.title, "; ".join(described), x, *drawn)


def _draw_values(values: list[float], x: Axis, middle: float) -> str:
    """Draw the quartiles, the median, and a dot per value; the dots' height has no meaning."""
    first, median, third = map(x, quantiles(values, 4))
    dots = "".join(
        f"M{x(value):.1f} {middle + (number * GOLDEN % 1 - 0.5) * 22:.1f}h0"
        for number, value in enumerate(values)
    )
    return (
        svg.rect("quartiles", first, middle - 15, third - first, 30)
        + svg.path("dots", dots)
        + svg.line("median", median, middle - 17, median, middle + 17)
    )
