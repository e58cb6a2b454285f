"""Draw curves with a common x axis. Each has a color, a dash pattern, and optionally a band around
it.

The page's script finds the nearest values under the pointer; `data-plot` holds the axis positions.
"""

from __future__ import annotations

import json
import math

from paralab.analyse.blocks import Line, Lines
from paralab.show.svg import (
    NARROW,
    Axis,
    Scale,
    axis,
    bottom_axis,
    element,
    known,
    left_axis,
    legend,
    log_axis,
    nothing,
    picture,
    width_of,
)
from paralab.units import measure

TOP, BOTTOM, RIGHT = 26, 44, 14  # px around the plot
COLOURS = 8
DASHES = (
    "",
    "7 3",
    "2 3",
    "9 3 2 3",
    "12 4",
    "4 2",
    "1 3",
    "6 2 1 2",
)  # eight overlapping curves must stay visible
MOST_DOTS = 24  # draw dots only on curves with at most this many points
MOST_POINTS = 400  # thin curves with more points than this


def lines_legend(lines: Lines) -> str:
    several = len(lines.lines) > 1
    return legend(
        (_swatch(number, _under(number, several)), line.label)
        for number, line in enumerate(lines.lines)
    )


def draw_lines(lines: Lines, name: str, width: int) -> str:
    height, right = 330 if width > NARROW else 270, width - RIGHT
    points = [[(x, y) for x, y in line.points if _drawable(x, lines.log_x)] for line in lines.lines]
    heights = known(
        [y for line in points for _, y in line]
        + [y for line in lines.lines for y in (*line.low, *line.high)]
    )
    if not heights:
        return nothing()
    from_zero = lines.y_unit in ("bytes", "share") or (
        lines.y_unit == "seconds" and min(heights) < 0.5 * max(heights)
    )
    y = axis(heights, lines.y_unit, height - BOTTOM, TOP, from_zero=from_zero)
    left = max(width_of(words) for _, words in y.ticks) + 14
    across = [x for line in points for x, _ in line]
    x = log_axis(across, left, right) if lines.log_x else _plain_axis(across, left, right)
    drawn = [
        _draw(line, number, _under(number, len(points) > 1), lines.log_x, x.scale, y.scale)
        for number, line in enumerate(lines.lines)
    ]
    told = "; ".join(_told(line, lines) for line in lines.lines)
    return picture(
        name,
        lines.title,
        f"{lines.y} over {lines.x}. {told}",
        width,
        height,
        bottom_axis(x, TOP, height - BOTTOM, lines.x + (" (logarithmic)" if lines.log_x else "")),
        left_axis(y, left, right, lines.y),
        *drawn,
        data_plot=_plot(x, y, lines.log_x),
    )


def _drawable(x: float, log_x: bool) -> bool:
    return bool(known([x])) and (x > 0 or not log_x)


def _plain_axis(values: list[float], left: float, right: float) -> Axis:
    """Create an axis that ends at the first and last values, not at ticks, so that a curve fills
    its plot."""
    round_ended = axis(
        values, "number", left, right, from_zero=False, about=int((right - left) // 75)
    )
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        return round_ended
    inside = tuple(tick for tick in round_ended.ticks if low <= tick[0] <= high)
    return Axis(Scale(low, high, left, right), inside, "")


def _draw(line: Line, number: int, under: str, log_x: bool, x: Scale, y: Scale) -> str:
    """Draw the band, the curve, and its points if there are few. An unknown value interrupts the
    curve."""
    places = [
        (x(px) if _drawable(px, log_x) else math.nan, y(py) if known([py]) else math.nan)
        for px, py in line.points
    ]
    colour = f"line-{number % COLOURS}"
    shapes = []
    if len(line.low) == len(line.high) == len(places) and places:
        edge = [(px, y(high)) for (px, _), high in zip(places, line.high, strict=True)]
        back = [(px, y(low)) for (px, _), low in zip(places, line.low, strict=True)]
        whole = [place for place in edge + back[::-1] if all(map(math.isfinite, place))]
        shapes.append(element("path", class_=f"band {colour}", d=path(whole) + "Z"))
    shapes.append(
        element(
            "path",
            class_=f"curve {colour}{under}",
            d=path(thin(places)),
            stroke_dasharray=DASHES[number % COLOURS] or None,
        )
    )
    if len(places) <= MOST_DOTS:
        dots = "".join(
            f"M{px:.1f} {py:.1f}h0" for px, py in places if math.isfinite(px) and math.isfinite(py)
        )
        shapes.append(element("path", class_=f"points {colour}", d=dots))
    return "".join(shapes)


def path(places: list[tuple[float, float]]) -> str:
    """Return an SVG path such as `M0 0L1 2…`. A point that is not finite starts a new segment."""
    written, pen = [], "M"
    for x, y in places:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        written.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return "".join(written)


def thin(places: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Thin out points, keeping the lowest and highest in each group of neighbors so that peaks
    survive."""
    if len(places) <= MOST_POINTS:
        return places
    group = math.ceil(len(places) / (MOST_POINTS / 2))
    kept = []
    for start in range(0, len(places), group):
        near = range(start, min(start + group, len(places)))
        kept += sorted(
            {min(near, key=lambda n: places[n][1]), max(near, key=lambda n: places[n][1])}
        )
    return [places[n] for n in kept]


def _under(number: int, several: bool) -> str:
    """Draw the first of several curves as a broad shadow, so equal curves on top of it stay
    visible."""
    return " under" if several and number == 0 else ""


def _swatch(number: int, under: str) -> str:
    dash = DASHES[number % COLOURS] or None
    return element(
        "path", class_=f"curve line-{number % COLOURS}{under}", d="M1 6H25", stroke_dasharray=dash
    )


def _told(line: Line, lines: Lines) -> str:
    found = known(y for _, y in line.points)
    if not found:
        return f"{line.label}: not measured"
    first, last = measure(found[0], lines.y_unit), measure(found[-1], lines.y_unit)
    lowest, highest = measure(min(found), lines.y_unit), measure(max(found), lines.y_unit)
    return f"{line.label}: {len(found)} points, first {first}, last {last}, lowest {lowest}, highest {highest}"


def _plot(x: Axis, y: Axis, log_x: bool) -> str:
    scales = {
        axis: [s.low, s.high, s.start_px, s.end_px] for axis, s in (("x", x.scale), ("y", y.scale))
    }
    return json.dumps({**scales, "log": log_x}, separators=(",", ":"))
