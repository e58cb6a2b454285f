"""Draw the pipeline schedule as two grids with one row per stage: the measured schedule on a time
axis, and the ideal schedule in slots.

Areas without a cell are the bubble. They are hatched to distinguish them from the background.
"""

from paralab.analyse.blocks import Schedule, Slot
from paralab.show.chart_bars import Rows
from paralab.show.palette import LEGEND, Legend, fill, kinds_legend
from paralab.show.svg import axis, finite, nothing, picture, rect, text, width_of
from paralab.units import measure, plural, seconds

HEAD, FOOT = 26, 44  # px above and below a grid
CELL = 26


def schedule_legend(schedule: Schedule) -> Legend:
    split = ("weights",) if any(slot.weights for slot in schedule.ideal) else ()
    return kinds_legend(("forward", "backward", *split, "bubble"))


def draw_schedule(schedule: Schedule, name: str, width: int) -> str:
    if not schedule.stages or not (schedule.measured or schedule.ideal):
        return nothing()
    where = "" if schedule.step is None else f" in step {schedule.step}"
    measured = f"measured{where}: bubble {measure(schedule.measured_bubble, 'share')}"
    ideal = f"ideal: bubble {measure(schedule.ideal_bubble, 'share')}"
    upper = Rows(list(schedule.stages), width, HEAD, 34)
    lower = Rows(list(schedule.stages), width, upper.bottom + FOOT + HEAD, 34)

    orders = "; ".join(_order(schedule, stage) for stage in range(len(schedule.stages)))
    return picture(
        name,
        schedule.title,
        f"{measured}; {ideal}. {orders}",
        (width, lower.bottom + 20),
        _grid(upper, schedule.measured, measured, "seconds"),
        _grid(lower, schedule.ideal, ideal, "slots"),
    )


def _grid(rows: Rows, slots: tuple[Slot, ...], title: str, unit: str) -> str:
    heading = text(title, 0, rows.top - 10, "chart-title")
    times = finite([time for slot in slots for time in (slot.start, slot.end)])
    if not times:
        return heading + text("not measured", rows.left, rows.top + 20, "unknown")

    begin, end = min(times), max(max(times), min(times) + 1e-9)
    room = rows.right - rows.left
    px_per_unit = room / (end - begin)
    drawn = [heading]
    for number in range(len(rows.labels)):
        top = rows.middle(number) - CELL / 2
        bubble = rect("span is-bubble", rows.left, top, room, CELL, fill=fill("bubble"), rx=None)
        drawn += [rows.draw_label(number), bubble]
    for slot in slots:
        x = rows.left + (slot.start - begin) * px_per_unit
        width = max((slot.end - slot.start) * px_per_unit, 0.8)
        drawn.append(_cell(slot, x, rows.middle(slot.stage), width, unit))

    ticks = axis([0, end - begin], unit, (0, 1), from_zero=True, about=rows.width // 90)
    for tick, words in ticks.labels():
        at = rows.left + tick * px_per_unit
        # The last label includes the unit and needs room to its left.
        if at <= rows.right - 30 or tick == ticks.high:
            anchor, place = ("middle", at) if at < rows.right - 20 else ("end", rows.width)
            shown = words if at <= rows.right + 1 else ticks.unit
            drawn.append(text(shown, place, rows.bottom + 15, "tick", anchor))
    return "".join(drawn)


def _cell(slot: Slot, x: float, middle: float, width: float, unit: str) -> str:
    length, label = slot.end - slot.start, _label(slot)
    how_long = seconds(length) if unit == "seconds" else plural(length, "slot")
    part = f", part {slot.part} of this stage" if slot.part else ""
    tip = f"{LEGEND[slot.kind][0]} of micro-batch {slot.micro}{part}: {how_long}"
    box = rect("span", x, middle - CELL / 2, width, CELL, tip, fill=fill(slot.kind))
    fits = width > width_of(label) + 2
    return box + (text(label, x + width / 2, middle + 4.5, "in-span", "middle") if fits else "")


def _label(slot: Slot) -> str:
    """Return the micro-batch number, with a prime for the stage's second part."""
    return f"{slot.micro}{'′' * slot.part}"


def _order(schedule: Schedule, stage: int) -> str:
    """Return `stage 0 does F0 F1 B0 B1`, ordered by time."""
    slots = [slot for slot in schedule.measured or schedule.ideal if slot.stage == stage]
    ordered = sorted(slots, key=lambda slot: slot.start)
    words = (slot.kind[0].upper() + _label(slot) for slot in ordered)
    return f"{schedule.stages[stage]} does {' '.join(words)}"
