"""Draw the pipeline schedule as two grids with one row per stage: the measured one on a time axis,
and the ideal one in slots.

Areas without a cell are the bubble. They are hatched to distinguish them from the background.
"""

from __future__ import annotations

from html import escape

from paralab.analyse.blocks import Schedule, Slot
from paralab.show.chart_bars import Rows, rows
from paralab.show.palette import fill, swatch
from paralab.show.svg import (
    axis,
    element,
    known,
    legend,
    nothing,
    picture,
    text,
    tick_text,
    width_of,
    with_unit,
)
from paralab.units import measure, seconds

HEAD, FOOT = 26, 44  # px above and below a grid
CELL = 26


def schedule_legend(schedule: Schedule) -> str:
    split = ("weights",) if any(slot.weights for slot in schedule.ideal) else ()
    return legend(swatch(kind) for kind in ("forward", "backward", *split, "bubble"))


def draw_schedule(schedule: Schedule, name: str, width: int) -> str:
    if not schedule.stages or not (schedule.measured or schedule.ideal):
        return nothing()
    measured = f"measured: bubble {measure(schedule.measured_bubble, 'share')}"
    ideal = f"ideal: bubble {measure(schedule.ideal_bubble, 'share')}"
    stages = list(schedule.stages)
    upper = rows(stages, width, HEAD, 34, [])
    lower = rows(stages, width, upper.bottom + FOOT + HEAD, 34, [])
    grids = _grid(upper, schedule.measured, measured, "seconds") + _grid(
        lower, schedule.ideal, ideal, "slots"
    )
    told = f"{measured}; {ideal}. " + "; ".join(
        _row(schedule, stage) for stage in range(len(stages))
    )
    return picture(name, schedule.title, told, width, lower.bottom + 20, grids)


def _grid(shape: Rows, slots: tuple[Slot, ...], title: str, unit: str) -> str:
    drawn = [text(title, 0, shape.top - 10, "chart-title")]
    times = known([time for slot in slots for time in (slot.start, slot.end)])
    if not times:
        return "".join([*drawn, text("not measured", shape.left, shape.top + 20, "unknown")])
    begin, end = min(times), max(max(times), min(times) + 1e-9)
    px_per_unit = (shape.right - shape.left) / (end - begin)
    for number in range(len(shape.labels)):
        bubble = {
            "x": shape.left,
            "y": shape.middle(number) - CELL / 2,
            "width": shape.right - shape.left,
            "height": CELL,
        }
        drawn += [
            shape.draw_label(number),
            element("rect", class_="span is-bubble", fill=fill("bubble"), **bubble),
        ]
    for slot in slots:
        x, width = (
            shape.left + (slot.start - begin) * px_per_unit,
            max((slot.end - slot.start) * px_per_unit, 0.8),
        )
        drawn.append(_cell(slot, x, shape.middle(slot.stage), width, unit))
    x_axis = axis([0, end - begin], unit, 0, 1, from_zero=True, about=shape.width // 90)
    for tick, words in with_unit(x_axis):
        at = shape.left + tick * px_per_unit
        if (
            at <= shape.right - 30 or tick == x_axis.ticks[-1][0]
        ):  # the last label includes the unit and needs room to its left
            anchor, place = ("middle", at) if at < shape.right - 20 else ("end", shape.width)
            drawn.append(
                text(
                    words if at <= shape.right + 1 else x_axis.unit,
                    place,
                    shape.bottom + 15,
                    "tick",
                    anchor,
                )
            )
    return "".join(drawn)


def _cell(slot: Slot, x: float, middle: float, width: float, unit: str) -> str:
    way = "weights" if slot.weights else "backward" if slot.backward else "forward"
    length, label = slot.end - slot.start, _label(slot)
    how_long = seconds(length) if unit == "seconds" else f"{tick_text(length)} slots"
    named = "backward, weights only" if slot.weights else way
    part = f", part {slot.part} of this stage" if slot.part else ""
    tip = element("title", escape(f"{named} of micro-batch {slot.micro}{part}: {how_long}"))
    box = element(
        "rect",
        tip,
        class_="span",
        x=x,
        y=middle - CELL / 2,
        width=width,
        height=CELL,
        rx=2,
        fill=fill(way),
    )
    fits = width > width_of(label) + 2
    return box + (text(label, x + width / 2, middle + 4.5, "in-span", "middle") if fits else "")


def _label(slot: Slot) -> str:
    """Return the micro-batch number, with a prime for the stage's second part."""
    return f"{slot.micro}{'′' * slot.part}"


def _row(schedule: Schedule, stage: int) -> str:
    """Return `stage 0 does F0 F1 B0 B1`, ordered by time."""
    slots = sorted(
        (slot for slot in schedule.measured or schedule.ideal if slot.stage == stage),
        key=lambda slot: slot.start,
    )
    kinds = ("W" if slot.weights else "B" if slot.backward else "F" for slot in slots)
    return f"{schedule.stages[stage]} does " + " ".join(
        kind + _label(slot) for kind, slot in zip(kinds, slots, strict=True)
    )
