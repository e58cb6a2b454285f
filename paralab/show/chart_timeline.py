"""Draw what each device did and when, with one lane per device and one for communication, on one
time axis.

This version works on paper and without scripts. The page's script lays out the same rectangles
again for the part that the reader zooms into; `data-index` links a rectangle to its span in the
page's data.
"""

from __future__ import annotations

from html import escape

from paralab.analyse.blocks import Span, Timeline
from paralab.show.palette import LEGEND, fill, kind_of, swatch
from paralab.show.svg import axis, element, known, legend, nothing, picture, text
from paralab.units import plural, seconds

WIDTH, SIDE = (
    860,
    8,
)  # px: the picture, and free space on each side for the outer tick labels
LANE_NAME, BAR, GAP = 18, 22, 10  # heights, in px
TOP = 26  # px for the step numbers
AXIS = 44


def timeline_legend(timeline: Timeline) -> str:
    kinds = {"exposed" if span.exposed else kind_of(span.kind) for span in timeline.spans}
    return legend(swatch(kind) for kind in LEGEND if kind in kinds)


def draw_timeline(timeline: Timeline, name: str) -> str:
    spans = timeline.spans
    times = known(
        [end for span in spans for end in (span.start, span.end)]
        + [end for _, *ends in timeline.steps for end in ends]
    )
    if not times:
        return nothing()
    begin, end = min(times), max(max(times), min(times) + 1e-9)
    px_per_second = (WIDTH - 2 * SIDE) / (end - begin)
    rows, depths = rows_of(timeline, (end - begin) / 5000)
    tops, bottom = _lane_tops(depths)

    rectangles, labels = [], []
    for index, span in enumerate(spans):
        x, width = (
            SIDE + (span.start - begin) * px_per_second,
            max((span.end - span.start) * px_per_second, 0.8),
        )
        y = tops[span.lane] + rows[index] * (BAR + 1)
        rectangles.append(_rectangle(span, index, x, y, width, begin))
        if width > 7 * len(span.label) + 8:
            labels.append(
                text(
                    span.label,
                    x + width / 2,
                    y + 15,
                    "in-span" + (" on-exposed" if span.exposed else ""),
                    "middle",
                )
            )
    return picture(
        name,
        timeline.title,
        _told(timeline, end - begin),
        WIDTH,
        bottom + AXIS,
        element("g", *(_lane(tops[n], depths[n]) for n in range(len(tops))), class_="lanes"),
        element("g", *_steps(timeline, begin, px_per_second, bottom), class_="steps"),
        element(
            "g",
            *(
                text(lane, SIDE + 5, tops[n] - 6, "lane-name")
                for n, lane in enumerate(timeline.lanes)
            ),
        ),
        element("g", *rectangles, class_="spans"),
        element("g", *labels, class_="labels"),
        element("g", *_time_axis(end - begin, bottom), class_="axis"),
        data_begin=repr(begin),
        data_end=repr(end),
        data_bottom=str(bottom),
    )


def rows_of(timeline: Timeline, tolerance: float) -> tuple[list[int], list[int]]:
    """Return each span's row within its lane, and the number of rows per lane. Overlapping spans
    get different rows: forward 0–4, backward 4–9, all-reduce 6–11 on one lane -> rows 0, 0, 1. An
    overlap below `tolerance` is clock noise."""
    rows = [0] * len(timeline.spans)
    ends: list[list[float]] = [[] for _ in timeline.lanes]
    for index in sorted(
        range(len(rows)), key=lambda n: (timeline.spans[n].start, -timeline.spans[n].end)
    ):
        span = timeline.spans[index]
        lane = ends[span.lane]
        free = next(
            (row for row, end in enumerate(lane) if end <= span.start + tolerance), len(lane)
        )
        lane[free:] = [span.end, *lane[free + 1 :]]
        rows[index] = free
    return rows, [max(len(lane), 1) for lane in ends]


def _lane_tops(depths: list[int]) -> tuple[list[float], float]:
    """Return the y position of each lane's first row, and the bottom of the last lane."""
    tops, y = [], float(TOP)
    for depth in depths:
        tops.append(y + LANE_NAME)
        y += LANE_NAME + depth * (BAR + 1) + GAP
    return tops, y


def _lane(top: float, depth: int) -> str:
    return element(
        "rect", class_="lane", x=0, y=top - 2, width="100%", height=depth * (BAR + 1) + 3, rx=3
    )


def _rectangle(span: Span, index: int, x: float, y: float, width: float, begin: float) -> str:
    exposed = ", exposed" if span.exposed else ""
    tip = f"{span.label} · {span.kind}{exposed} · {seconds(span.end - span.start)} from {seconds(span.start - begin)}"
    return element(
        "rect",
        element("title", escape(tip)),
        class_="span is-exposed" if span.exposed else "span",
        x=x,
        y=y,
        width=width,
        height=BAR,
        rx=2,
        fill=fill("exposed" if span.exposed else span.kind),
        data_index=str(index),
    )


def _steps(timeline: Timeline, begin: float, px_per_second: float, bottom: float) -> list[str]:
    drawn = []
    for number, start, end in timeline.steps:
        x = SIDE + (start - begin) * px_per_second
        drawn.append(element("line", class_="step", x1=x, x2=x, y1=4, y2=bottom))
        if (end - start) * px_per_second > 56:
            drawn.append(text(f"step {number}", x + 5, 14, "tick"))
    return drawn


def _time_axis(extent: float, bottom: float) -> list[str]:
    """Draw the time axis, which starts at 0 at the beginning of the chart."""
    x = axis([0, extent], "seconds", SIDE, WIDTH - SIDE, from_zero=True, about=8)
    px_per_second = (WIDTH - 2 * SIDE) / extent
    drawn = []
    for tick, words in x.ticks:
        at = SIDE + tick * px_per_second
        if at <= WIDTH - SIDE + 0.5:
            drawn.append(element("line", class_="grid", x1=at, x2=at, y1=bottom, y2=bottom + 5))
            drawn.append(text(words, at, bottom + 18, "tick", "middle"))
    return [
        *drawn,
        text(f"{x.unit} from the start", WIDTH - SIDE, bottom + 36, "axis-name", "end"),
    ]


def _told(timeline: Timeline, extent: float) -> str:
    """Describe the chart in words: how long each lane spent on each kind of work."""
    lanes = []
    for number, lane in enumerate(timeline.lanes):
        spent: dict[str, float] = {}
        for span in timeline.spans:
            if span.lane == number:
                what = LEGEND[kind_of(span.kind)][0] + (", exposed" if span.exposed else "")
                spent[what] = spent.get(what, 0.0) + span.end - span.start
        lanes.append(
            f"{lane}: "
            + (", ".join(f"{what} {seconds(time)}" for what, time in spent.items()) or "nothing")
        )
    return f"{plural(len(timeline.steps), 'step')} in {seconds(extent)}. " + "; ".join(lanes)
