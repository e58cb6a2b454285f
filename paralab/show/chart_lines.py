"""Draw curves that share an x axis. Each curve has a color, a dash pattern, and optionally a band
around it.

The page's script finds the values nearest to the pointer, using the axis positions in `data-plot`.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import replace

from paralab.analyse.blocks import Line, Lines
from paralab.show import svg
from paralab.show.palette import Legend
from paralab.show.svg import Axis
from paralab.units import measure, plural

TOP, BOTTOM, RIGHT = 26, 44, 14  # px around the plot
# With different dashes, eight overlapping curves stay visible.
DASHES = (None, "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 3", "6 2 1 2")
MOST_DOTS = 24  # draw dots only on curves with at most this many points
MOST_POINTS = 400  # thin out curves with more points than this

Place = tuple[float, float]


def lines_legend(lines: Lines) -> Legend:
    several = len(lines.lines) > 1
    return [(_curve("M1 6H25", n, several), line.label) for n, line in enumerate(lines.lines)]


def draw_lines(lines: Lines, name: str, width: int) -> str:
    height, right = 330 if width > svg.NARROW else 270, width - RIGHT
    points = [(x, y) for line in lines.lines for x, y in line.points if _drawable(x, lines.log_x)]
    edges = [y for line in lines.lines for y in (*line.low, *line.high)]
    heights = svg.finite([y for _, y in points] + edges)
    if not heights:
        return svg.nothing()

    is_near_zero = 0 <= min(heights) < 0.5 * max(heights)
    from_zero = lines.y_unit in ("bytes", "cores", "share") or is_near_zero
    y = svg.axis(heights, lines.y_unit, (height - BOTTOM, TOP), from_zero)
    left = max(svg.width_of(words) for _, words in y.ticks) + 14
    x = (svg.log_axis if lines.log_x else _full_axis)([x for x, _ in points], left, right)

    name_x = lines.x + (" (logarithmic)" if lines.log_x else "")
    described = "; ".join(_describe(line, lines.y_unit) for line in lines.lines)
    x_scale, y_scale = ([each.low, each.high, each.start_px, each.end_px] for each in (x, y))
    scales = {"x": x_scale, "y": y_scale, "log": lines.log_x}
    return svg.picture(
        name,
        lines.title,
        f"{lines.y} over {lines.x}. {described}",
        (width, height),
        svg.bottom_axis(x, TOP, height - BOTTOM, name_x),
        svg.left_axis(y, left, right, lines.y),
        *(_draw(line, n, len(lines.lines) > 1, x, y) for n, line in enumerate(lines.lines)),
        data_plot=json.dumps(scales, separators=(",", ":")),
    )


def _drawable(x: float, log_x: bool) -> bool:
    return math.isfinite(x) and (x > 0 or not log_x)


def _full_axis(values: list[float], left: float, right: float) -> Axis:
    """Create an axis that ends at the outermost values, so that a curve fills its plot. Counts,
    such as steps and devices, have only whole ticks."""
    x = svg.axis(values, "number", (left, right), from_zero=False, about=int((right - left) // 75))
    low, high = min(values), max(values)
    if low == high:  # a single point in the middle
        return replace(x, low=low - 1, high=high + 1, ticks=((low, svg.tick_text(low)),))
    are_counts = all(map(_is_whole, values))
    shown = (tick for tick in x.ticks if low <= tick[0] <= high)
    ticks = tuple(tick for tick in shown if _is_whole(tick[0]) or not are_counts)
    return replace(x, low=low, high=high, ticks=ticks)


def _is_whole(value: float) -> bool:
    return float(value).is_integer()


def _draw(line: Line, number: int, several: bool, x: Axis, y: Axis) -> str:
    """Draw the band, the curve, and its points if they are few. Unknown values leave gaps."""
    places = [
        (x(px) if _drawable(px, x.log) else math.nan, y(py) if svg.finite([py]) else math.nan)
        for px, py in line.points
    ]
    band = dots = ""
    if len(line.low) == len(line.high) == len(places) and places:
        edge, back = (
            [(px, y(value)) for (px, _), value in zip(places, values, strict=True)]
            for values in (line.high, line.low)
        )
        outline = connect(filter(_finite, edge + back[::-1]))
        band = svg.path(f"band line-{number % len(DASHES)}", outline + "Z")
    if len(places) <= MOST_DOTS:
        marks = "".join(f"M{px:.1f} {py:.1f}h0" for px, py in filter(_finite, places))
        dots = svg.path(f"points line-{number % len(DASHES)}", marks)
    return band + _curve(connect(thin(places)), number, several) + dots


def _curve(d: str, number: int, several: bool) -> str:
    """Draw a curve. If there are several, the first is a broad shadow, so equal curves stay
    visible."""
    style = number % len(DASHES)
    under = " under" if several and number == 0 else ""
    return svg.path(f"curve line-{style}{under}", d, stroke_dasharray=DASHES[style])


def _finite(place: Place) -> bool:
    return math.isfinite(place[0]) and math.isfinite(place[1])


def connect(places: Iterable[Place]) -> str:
    """Return an SVG path such as `M0 0L1 2…`. A point that is not finite starts a new segment."""
    written, pen = "", "M"
    for x, y in places:
        finite = _finite((x, y))
        written += f"{pen}{x:.1f} {y:.1f}" if finite else ""
        pen = "L" if finite else "M"
    return written


def thin(places: list[Place]) -> list[Place]:
    """Keep the lowest and highest of each group of neighbors, so that peaks stay visible."""
    if len(places) <= MOST_POINTS:
        return places
    group = math.ceil(len(places) / (MOST_POINTS / 2))
    kept: list[int] = []
    for start in range(0, len(places), group):
        near = range(start, min(start + group, len(places)))
        lowest, highest = (pick(near, key=lambda n: places[n][1]) for pick in (min, max))
        kept += sorted({lowest, highest})
    return [places[n] for n in kept]


def _describe(line: Line, unit: str) -> str:
    ys = svg.finite(y for _, y in line.points)
    if not ys:
        return f"{line.label}: not measured"
    numbers = {"first": ys[0], "last": ys[-1], "lowest": min(ys), "highest": max(ys)}
    words = (f"{name} {measure(value, unit)}" for name, value in numbers.items())
    return f"{line.label}: {plural(len(ys), 'point')}, {', '.join(words)}"
