"""Draw what each device did and when, on one time axis, with one lane per device and one for
communication.

This drawing works on paper and without scripts. The page's script lays out the same rectangles
again for the part that the reader zooms into. `data-index` links a rectangle to its span in the
page's data.
"""

from collections import defaultdict

from paralab.analyse.blocks import Span, Timeline
from paralab.analyse.time_intervals import lanes
from paralab.show.palette import LEGEND, Legend, fill, kind_of, kinds_legend
from paralab.show.svg import axis, element, finite, line, nothing, picture, rect, text
from paralab.units import plural, seconds

WIDTH = 860
SIDE = 8  # px: free space on each side for the outer tick labels
LANE_NAME, BAR, GAP = 18, 22, 10  # heights, in px
TOP = 26  # px for the step numbers
AXIS = 44


def timeline_legend(timeline: Timeline) -> Legend:
    kinds = {"exposed" if span.exposed else kind_of(span.kind) for span in timeline.spans}
    return kinds_legend(kind for kind in LEGEND if kind in kinds)


def draw_timeline(timeline: Timeline, name: str, width: int = WIDTH) -> str:
    times = finite(
        [end for span in timeline.spans for end in (span.start, span.end)]
        + [end for _, *ends in timeline.steps for end in ends]
    )
    if not times:
        return nothing()
    begin, end = min(times), max(max(times), min(times) + 1e-9)
    px_per_second = (width - 2 * SIDE) / (end - begin)
    rows, depths = rows_of(timeline, (end - begin) / 5000)

    tops, bottom = [], float(TOP)  # the y position of each lane's first row
    for depth in depths:
        tops.append(bottom + LANE_NAME)
        bottom += LANE_NAME + depth * (BAR + 1) + GAP

    spans, labels = [], []
    for index, span in enumerate(timeline.spans):
        x = SIDE + (span.start - begin) * px_per_second
        y = tops[span.lane] + rows[index] * (BAR + 1)
        length = max((span.end - span.start) * px_per_second, 0.8)
        spans.append(_draw_span(span, index, x, y, length, begin))
        if length > 7 * len(span.label) + 8:
            class_ = "in-span on-exposed" if span.exposed else "in-span"
            labels.append(text(span.label, x + length / 2, y + 15, class_, "middle"))

    steps = []
    for number, start, stop in timeline.steps:
        x = SIDE + (start - begin) * px_per_second
        steps.append(line("step", x, 4, x, bottom))
        if (stop - start) * px_per_second > 56:
            steps.append(text(f"step {number}", x + 5, 14, "tick"))

    grounds, names = [], []
    for lane, top, depth in zip(timeline.lanes, tops, depths, strict=True):
        grounds.append(rect("lane", 0, top - 2, "100%", depth * (BAR + 1) + 3, rx=3))
        names.append(text(lane, SIDE + 5, top - 6, "lane-name"))
    return picture(
        name,
        timeline.title,
        _describe(timeline, end - begin),
        (width, bottom + AXIS),
        element("g", *grounds, class_="lanes"),
        element("g", *steps, class_="steps"),
        element("g", *names),
        element("g", *spans, class_="spans"),
        element("g", *labels, class_="labels"),
        element("g", *_time_axis(end - begin, px_per_second, bottom, width), class_="axis"),
        data_begin=repr(begin),
        data_end=repr(end),
        data_bottom=str(bottom),
    )


def rows_of(timeline: Timeline, tolerance: float) -> tuple[list[int], list[int]]:
    """Return each span's row within its lane, and the number of rows per lane. Overlapping spans
    get different rows: forward 0–4, backward 4–9, and all-reduce 6–11 on one lane get rows 0, 0,
    and 1. An overlap below `tolerance` is clock noise."""
    spans, rows, depths = timeline.spans, [0] * len(timeline.spans), []
    for lane in range(len(timeline.lanes)):
        own = [n for n, span in enumerate(spans) if span.lane == lane]
        own_rows = lanes([(spans[n].start + tolerance, spans[n].end) for n in own], nested=False)
        for n, row in zip(own, own_rows, strict=True):
            rows[n] = row
        depths.append(max(own_rows, default=0) + 1)
    return rows, depths


def _draw_span(span: Span, index: int, x: float, y: float, width: float, begin: float) -> str:
    duration, start = seconds(span.end - span.start), seconds(span.start - begin)
    exposed = ", exposed" if span.exposed else ""
    tip = f"{span.label} · {span.kind}{exposed} · {duration} from {start}"
    class_ = "span is-exposed" if span.exposed else "span"
    paint = fill("exposed" if span.exposed else span.kind)
    return rect(class_, x, y, width, BAR, tip, fill=paint, data_index=str(index))


def _time_axis(extent: float, px_per_second: float, bottom: float, width: int) -> list[str]:
    """Draw the time axis. The chart starts at 0."""
    about = max(3, width // 100)
    x = axis([0, extent], "seconds", (SIDE, width - SIDE), from_zero=True, about=about)
    drawn = []
    for tick, words in x.ticks:
        at = SIDE + tick * px_per_second
        if at <= width - SIDE + 0.5:
            drawn.append(line("grid", at, bottom, at, bottom + 5))
            drawn.append(text(words, at, bottom + 18, "tick", "middle"))
    name = text(f"{x.unit} from the start", width - SIDE, bottom + 36, "axis-name", "end")
    return [*drawn, name]


def _describe(timeline: Timeline, extent: float) -> str:
    """Describe the chart in words: how long each lane spent on each kind of work."""
    per_lane: list[dict[str, float]] = [defaultdict(float) for _ in timeline.lanes]
    for span in timeline.spans:
        kind = LEGEND[kind_of(span.kind)][0] + (", exposed" if span.exposed else "")
        per_lane[span.lane][kind] += span.end - span.start
    words = []
    for lane, spent in zip(timeline.lanes, per_lane, strict=True):
        times = ", ".join(f"{kind} {seconds(time)}" for kind, time in spent.items())
        words.append(f"{lane}: {times or 'nothing'}")
    return f"{plural(len(timeline.steps), 'step')} in {seconds(extent)}. " + "; ".join(words)
