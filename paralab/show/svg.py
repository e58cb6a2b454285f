"""Write SVG by hand: escaped elements, scales, axes with ticks at round numbers.

The page needs six kinds of charts that work offline, print well, and are accessible. Plain SVG does
that in a few kilobytes; a chart library adds megabytes and cannot draw without scripts. Colors are
CSS variables defined in the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

# Mean character width of 13 px text in a wide font: accurate enough to decide if a label fits.
CHARACTER_PX = 7.5
BOLD = 1.12  # how much wider bold text is
WIDE, NARROW = (
    800,
    330,
)  # each chart is drawn for a desktop and for a phone; the style sheet shows one of them
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # tick distances that are easy to read


def number(value: float) -> str:
    """Format a coordinate, rounded to a tenth of a pixel to keep the file small."""
    short = f"{value:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


def element(name: str, *content: str, **attributes: str | float | None) -> str:
    """Create an element: `element("rect", class_="bar", x=0)`. Content is markup, attributes are
    escaped here, and None omits an attribute."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value) if isinstance(value, str) else number(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(content)}</{name}>" if content else f"<{name}{written}/>"


def text(
    words: str,
    x: float,
    y: float,
    class_: str | None = None,
    anchor: str | None = None,
    tip: str = "",
) -> str:
    """Draw text at a point. `tip` appears on hover: the full text of a shortened label."""
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
    width: float,
    height: float,
    *content: str,
    **attributes: str | None,
) -> str:
    """Create a complete chart with its text alternative. `--w` lets the style sheet limit scaling,
    so the text keeps its size."""
    head = element("title", escape(title), id=f"{name}-title") + element(
        "desc", escape(description), id=f"{name}-desc"
    )
    return element(
        "svg",
        head,
        *content,
        xmlns="http://www.w3.org/2000/svg",
        class_="narrow" if width == NARROW else "wide",
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        style=f"--w:{number(width)}",
        **attributes,
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Create a legend from (swatch, text) pairs. It is HTML, which wraps on a phone; a drawn legend
    would be cut off."""
    items = (
        f'<li><svg viewBox="0 0 26 12" aria-hidden="true">{swatch}</svg>{escape(words)}</li>'
        for swatch, words in entries
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def nothing(why: str = "not measured") -> str:
    return f'<p class="nothing">{escape(why)}</p>'


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that are finite numbers."""
    return [value for value in values if value is not None and math.isfinite(value)]


def round_step(rough: float) -> float:
    """Round up to a readable tick distance: 0.13 -> 0.2, 30 -> 50."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in STEPS if step * power >= rough * 0.999)


@dataclass(frozen=True)
class Scale:
    """Maps numbers to pixels along one axis."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start_px + share * (self.end_px - self.start_px)


@dataclass(frozen=True)
class Axis:
    """A scale with its ticks as (value, label) pairs. `unit` is the label unit."""

    scale: Scale
    ticks: tuple[tuple[float, str], ...]
    unit: str


def shown_unit(unit: str, largest: float) -> tuple[float, str]:
    """Return a conversion factor and the display unit's name: 0.05 seconds are shown in ms."""
    if unit == "seconds":
        return next(
            (factor, name)
            for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
            if largest * factor >= 1 or name == "µs"
        )
    if unit == "bytes":
        power = min(int(math.log(largest, 1024)), 4) if largest >= 1 else 0
        return 1024.0**-power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    if unit == "share":
        return 100.0, "%"
    return 1.0, "" if unit == "number" else unit


def axis(
    values: Iterable[float],
    unit: str,
    start_px: float,
    end_px: float,
    *,
    from_zero: bool,
    about: int = 5,
) -> Axis:
    """Create an axis that contains all values and ends at ticks. Without values, it goes from 0 to
    1."""
    found = list(values)
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        margin = abs(high) * 0.1 or 1.0
        low, high = (low if from_zero and low == 0 else low - margin), high + margin
    factor, name = shown_unit(unit, max(abs(low), abs(high)))
    step = round_step((high - low) * factor / about)
    first, last = math.floor(low * factor / step + 1e-9), math.ceil(high * factor / step - 1e-9)
    ticks = tuple((n * step / factor, tick_text(n * step)) for n in range(first, last + 1))
    return Axis(Scale(ticks[0][0], ticks[-1][0], start_px, end_px), ticks, name)


def log_axis(values: Iterable[float], start_px: float, end_px: float) -> Axis:
    """Create a logarithmic axis with ticks at 1, 2, and 5 times powers of ten, or only at powers of
    ten if there would be many ticks."""
    found = [value for value in values if value > 0]
    low, high = (min(found), max(found)) if found else (1.0, 10.0)
    if low == high:
        low, high = low / 2, high * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    heads = (1, 2, 5) if len(powers) * 3 * 30 <= end_px - start_px else (1,)
    ticks = [head * 10.0**power for power in powers for head in heads]
    inside = tuple((tick, tick_text(tick)) for tick in ticks if low * 0.999 <= tick <= high * 1.001)
    return Axis(Scale(low, high, start_px, end_px, log=True), inside, "")


def tick_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.6g}"


def bottom_axis(x: Axis, top: float, bottom: float, name: str = "") -> str:
    """Draw grid lines, tick labels, and the axis name below a plot."""
    lines = (
        element("line", class_="grid", x1=x.scale(tick), x2=x.scale(tick), y1=top, y2=bottom)
        for tick, _ in x.ticks
    )
    title = text(name, x.scale.end_px, bottom + 36, "axis-name", "end") if name else ""
    return element(
        "g",
        *lines,
        *(
            text(words, x.scale(tick), bottom + 18, "tick", "middle")
            for tick, words in with_unit(x)
        ),
        title,
    )


def with_unit(x: Axis) -> list[tuple[float, str]]:
    """Return the tick labels, with the unit after the last one: `0 20 40 60 ms`."""
    return [
        (tick, f"{words} {x.unit}".rstrip() if tick == x.ticks[-1][0] else words)
        for tick, words in x.ticks
    ]


def left_axis(y: Axis, left: float, right: float, name: str = "") -> str:
    lines = (
        element("line", class_="grid", x1=left, x2=right, y1=y.scale(tick), y2=y.scale(tick))
        for tick, _ in y.ticks
    )
    words = (text(words, left - 8, y.scale(tick) + 4, "tick", "end") for tick, words in y.ticks)
    unit = f"{name} ({y.unit})" if name and y.unit else name or y.unit
    return element("g", *lines, *words, text(unit, 0, 13, "axis-name"))
