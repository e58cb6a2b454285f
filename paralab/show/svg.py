"""Write SVG without a chart library: escaped elements, scales, and axes with ticks at round
numbers.

The page needs six kinds of charts that work offline, print well, and are accessible. Plain SVG is
enough, in a few kilobytes. A chart library adds megabytes and cannot draw without scripts. Colors
are CSS variables defined in the page.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from paralab.units import size_unit, time_unit

# Mean character width of 13 px text in a wide font: accurate enough to decide whether a label fits.
CHARACTER_PX = 7.5
BOLD = 1.12  # bold text is wider by this factor
# We draw each chart for a desktop and for a phone; the style sheet shows one of them.
WIDE, NARROW = 800, 330
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # tick distances that are easy to read

Attribute = str | float | None


def number(value: float) -> str:
    """Format a coordinate, rounded to a tenth of a pixel to keep the file small."""
    short = f"{value:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


def element(name: str, *content: str, **attributes: Attribute) -> str:
    """Create an element: `element("rect", class_="bar", x=0)`. `content` is markup that the caller
    has escaped. This escapes the attributes, and omits an attribute that is None."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value) if isinstance(value, str) else number(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(content)}</{name}>" if content else f"<{name}{written}/>"


def rect(
    class_: str,
    x: float,
    y: float,
    width: Attribute,
    height: float,
    tip: str = "",
    **more: Attribute,
) -> str:
    """Draw a rectangle with rounded corners. `tip` appears on hover."""
    title = [element("title", escape(tip))] if tip else []
    more = {"rx": 2, **more}
    return element("rect", *title, class_=class_, x=x, y=y, width=width, height=height, **more)


def line(class_: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return element("line", class_=class_, x1=x1, y1=y1, x2=x2, y2=y2)


def path(class_: str, d: str, **more: Attribute) -> str:
    return element("path", class_=class_, d=d, **more)


def text(
    words: str, x: float, y: float, class_: str, anchor: str | None = None, tip: str = ""
) -> str:
    """Draw text at a point. `tip`, such as the full text of a shortened label, appears on hover."""
    title = element("title", escape(tip)) if tip else ""
    return element("text", title + escape(words), class_=class_, x=x, y=y, text_anchor=anchor)


def width_of(words: str, bold: bool = False) -> float:
    return CHARACTER_PX * len(words) * (BOLD if bold else 1)


def label(words: str, x: float, y: float, room: float, anchor: str = "end") -> str:
    """Draw a label, shortened if it does not fit."""
    fits = max(int(room / CHARACTER_PX), 2)
    short = words if len(words) <= fits else words[: fits - 1].rstrip() + "…"
    return text(short, x, y, "label", anchor, tip="" if short == words else words)


def picture(
    name: str,
    title: str,
    description: str,
    size: tuple[float, float],
    *content: str,
    **more: Attribute,
) -> str:
    """Create a complete chart with its text alternative. The style sheet uses `--w` to limit
    scaling, so that the text keeps its size."""
    width, height = map(number, size)
    return element(
        "svg",
        element("title", escape(title), id=f"{name}-title"),
        element("desc", escape(description), id=f"{name}-desc"),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        class_="narrow" if size[0] == NARROW else "wide",
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        style=f"--w:{width}",
        **more,
    )


def nothing(why: str = "not measured") -> str:
    return f'<p class="nothing">{escape(why)}</p>'


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that are finite numbers."""
    return [value for value in values if value is not None and math.isfinite(value)]


def round_step(rough: float) -> float:
    """Round up to a readable tick distance: 0.13 -> 0.2, 30 -> 50."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in STEPS if step * power >= rough * 0.999)


@dataclass(frozen=True)
class Axis:
    """Maps numbers to pixels: `x(value)`. Each tick has a value and a label, which is in `unit`."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: tuple[tuple[float, str], ...]
    unit: str = ""
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start_px + share * (self.end_px - self.start_px)

    def labels(self) -> list[tuple[float, str]]:
        """Return the ticks, with the unit after the last one: `0 20 40 60 ms`."""
        space = "" if self.unit in ("", "%") else " "
        last = ((tick, f"{words}{space}{self.unit}") for tick, words in self.ticks[-1:])
        return [*self.ticks[:-1], *last]


def shown_unit(unit: str, largest: float) -> tuple[float, str]:
    """Return a conversion factor and the display unit's name: 0.05 seconds appear in ms."""
    if unit == "seconds":
        return time_unit(largest)
    if unit == "bytes":
        return size_unit(largest)
    if unit == "share":
        return 100.0, "%"
    return 1.0, "" if unit == "number" else unit


def axis(
    values: Iterable[float], unit: str, px: tuple[float, float], from_zero: bool, about: int = 5
) -> Axis:
    """Create an axis from tick to tick around all values, with about `about` ticks."""
    numbers = list(values)
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        margin = abs(high) * 0.1 or 1.0
        low, high = (low if from_zero and low == 0 else low - margin), high + margin

    factor, name = shown_unit(unit, max(abs(low), abs(high)))
    step = round_step((high - low) * factor / about)
    first, last = math.floor(low * factor / step + 1e-9), math.ceil(high * factor / step - 1e-9)
    ticks = tuple((n * step / factor, tick_text(n * step)) for n in range(first, last + 1))
    return Axis(ticks[0][0], ticks[-1][0], *px, ticks, name)


def log_axis(values: Iterable[float], start_px: float, end_px: float) -> Axis:
    """Create a logarithmic axis with ticks at powers of ten, and at 2 and 5 if there is room."""
    positive = [value for value in values if value > 0]
    low, high = (min(positive), max(positive)) if positive else (1.0, 10.0)
    if low == high:
        low, high = low / 2, high * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    heads = (1, 2, 5) if len(powers) * 3 * 30 <= end_px - start_px else (1,)
    ticks = [head * 10.0**power for power in powers for head in heads]
    inside = tuple((tick, tick_text(tick)) for tick in ticks if low * 0.999 <= tick <= high * 1.001)
    return Axis(low, high, start_px, end_px, inside, log=True)


def tick_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.6g}"


def bottom_axis(
    x: Axis, top: float, bottom: float, name: str = "", width: float | None = None
) -> str:
    """Draw grid lines, tick labels, and the axis name below a plot. Labels stay inside `width`."""
    labels = []
    for tick, words in x.labels():
        at, half = x(tick), width_of(words) / 2
        if width is not None:
            at = min(max(at, half), width - half)
        labels.append(text(words, at, bottom + 18, "tick", "middle"))
    return element(
        "g",
        *(line("grid", x(tick), top, x(tick), bottom) for tick, _ in x.ticks),
        *labels,
        text(name, x.end_px, bottom + 36, "axis-name", "end") if name else "",
    )


def left_axis(y: Axis, left: float, right: float, name: str) -> str:
    """Draw grid lines and tick labels, with the axis name above them."""
    return element(
        "g",
        *(line("grid", left, y(tick), right, y(tick)) for tick, _ in y.ticks),
        *(text(words, left - 8, y(tick) + 4, "tick", "end") for tick, words in y.ticks),
        text(f"{name} ({y.unit})" if y.unit else name, 0, 13, "axis-name"),
    )
