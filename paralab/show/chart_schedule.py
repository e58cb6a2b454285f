"""The pipeline as two grids, one row per stage: as it was measured, to the scale of time, and as it would ideally be, in slots.

What no cell covers is the bubble: it is hatched, so that it is seen as something and not as paper.
"""

from __future__ import annotations

from html import escape

from paralab.analyse.blocks import Schedule, Slot
from paralab.show.palette import fill, swatch, textures
from paralab.show.svg import axis, element, known, label, legend, nothing, picture, text, tick_text, width_of
from paralab.units import measure, seconds

WIDTH, ROW, CELL = 720, 34, 26
HEAD, FOOT = 26, 44  # px above and below a grid


def draw_schedule(schedule: Schedule, name: str) -> str:
    if not schedule.stages or not (schedule.measured or schedule.ideal):
        return nothing()
    left = min(max(map(width_of, schedule.stages)) + 18, 190)
    height = HEAD + ROW * len(schedule.stages) + FOOT
    measured = f"measured: bubble {measure(schedule.measured_bubble, 'share')}"
    ideal = f"ideal: bubble {measure(schedule.ideal_bubble, 'share')}"
    grids = (
        _grid(schedule.stages, schedule.measured, name, left, 0, measured, "seconds"),
        _grid(schedule.stages, schedule.ideal, name, left, height, ideal, "slots"),
    )
    kinds = ["forward", "backward", "bubble"]
    told = f"{measured}; {ideal}. " + "; ".join(_row(schedule, stage) for stage in range(len(schedule.stages)))
    drawn = picture(name, schedule.title, told, WIDTH, 2 * height, textures(name, kinds), *grids)
    return legend(swatch(name, kind) for kind in kinds) + drawn


def _grid(stages: tuple[str, ...], slots: tuple[Slot, ...], name: str, left: float, top: float, title: str, unit: str) -> str:
    drawn = [text(title, 0, top + 15, "chart-title")]
    times = known([time for slot in slots for time in (slot.start, slot.end)])
    if not times:
        return "".join([*drawn, text("not measured", left, top + HEAD + 20, "unknown")])
    begin, end = min(times), max(max(times), min(times) + 1e-9)
    px_per_unit = (WIDTH - left - 4) / (end - begin)
    for number, stage in enumerate(stages):
        y = top + HEAD + ROW * number
        drawn.append(label(stage, left - 12, y + 18, left - 12))
        bubble = {"x": left, "y": y, "width": WIDTH - left - 4, "height": CELL}
        drawn.append(element("rect", class_="span is-bubble", fill=fill(name, "bubble"), **bubble))
    for slot in slots:
        x, width = left + (slot.start - begin) * px_per_unit, max((slot.end - slot.start) * px_per_unit, 0.8)
        drawn.append(_cell(slot, name, x, top + HEAD + ROW * slot.stage, width, begin, unit))
    bottom = top + HEAD + ROW * len(stages)
    x_axis = axis([0, end - begin], unit, 0, 1, from_zero=True, about=8)
    for tick, words in x_axis.ticks:
        if tick <= (end - begin) * 1.001:
            at = min(left + tick * px_per_unit, WIDTH - 8)
            drawn.append(element("line", class_="grid", x1=at, x2=at, y1=bottom - 6, y2=bottom - 1))
            drawn.append(text(words, at, bottom + 11, "tick", "middle"))
    return "".join([*drawn, text(x_axis.unit, WIDTH - 4, bottom + 26, "axis-name", "end")])


def _cell(slot: Slot, name: str, x: float, y: float, width: float, begin: float, unit: str) -> str:
    way = "backward" if slot.backward else "forward"
    length = slot.end - slot.start
    how_long = seconds(length) if unit == "seconds" else f"{tick_text(length)} slots"
    tip = element("title", escape(f"{way} of micro-batch {slot.micro}: {how_long}"))
    box = element("rect", tip, class_="span", x=x, y=y, width=width, height=CELL, rx=2, fill=fill(name, way))
    fits = width > width_of(str(slot.micro)) + 3
    return box + (text(str(slot.micro), x + width / 2, y + 17.5, "in-span", "middle") if fits else "")


def _row(schedule: Schedule, stage: int) -> str:
    """`stage 0 does F0 F1 B0 B1`, in the order of time."""
    slots = sorted((slot for slot in schedule.measured or schedule.ideal if slot.stage == stage), key=lambda slot: slot.start)
    return f"{schedule.stages[stage]} does " + " ".join(f"{'B' if slot.backward else 'F'}{slot.micro}" for slot in slots)
