"""Draw a figure with sliders: lanes of boxes on one axis. explore.js draws the same figure.

The picture has the same size for any number of lanes, so a slider never moves the page.
"""

from paralab.analyse.blocks import Explorable
from paralab.show import svg
from paralab.show.explore import State, start_of
from paralab.show.palette import Legend, fill, kinds_legend

HEIGHTS = {"schedule": 280, "overlap": 114, "memory": 220, "split": 230, "what_if": 280}  # px
AXIS, LABELS, RIGHT = 26, 92, 46  # px below, to the left, and to the right of the lanes
TALLEST, SHARE = 44, 0.8  # a lane's height in px, and the share of it that its boxes fill
# Every kind that a figure can show, so that the legend stays when a slider moves.
KINDS = {
    "schedule": ("forward", "backward", "weights", "difference"),
    "overlap": ("backward", "all_reduce", "exposed"),
    "memory": ("parameters", "gradients", "optimizer", "activations"),
    "split": ("samples",),
    "what_if": ("compute", "optimizer", "other", "exposed"),
}


def explore_legend(block: Explorable) -> Legend:
    kinds = KINDS[block.figure]
    return kinds_legend(kinds) if len(kinds) > 1 else []


def draw_start(block: Explorable, name: str, width: int) -> str:
    state = start_of(block)
    words = "; ".join(f"{output.label}: {output.text}" for output in state.outputs)
    height = HEIGHTS[block.figure]
    lanes = draw_lanes(state, width, height)
    return svg.picture(name, block.title, words, (width, height), lanes)


def draw_lanes(state: State, width: int, height: int) -> str:
    ends = [box.end for lane in state.lanes for box in lane.boxes]
    x = svg.axis([0, *ends], state.unit, (LABELS, width - RIGHT), True, max(3, width // 120))
    tall = min(TALLEST, (height - AXIS) / len(state.lanes))
    bottom, thick = tall * len(state.lanes), tall * SHARE
    drawn = [svg.bottom_axis(x, 0, bottom)]
    for number, lane in enumerate(state.lanes):
        top = tall * number
        baseline = top + thick / 2 + 4.5
        drawn.append(svg.text(lane.label, LABELS - 8, baseline, "label", "end"))
        for box in lane.boxes:
            left, room = x(box.start), max(x(box.end) - x(box.start), 0.5)
            look = f"span is-{box.kind}"
            drawn.append(svg.rect(look, left, top, room, thick, fill=fill(box.kind), rx=None))
            if box.words and thick >= 13 and room > svg.width_of(box.words) + 2:
                drawn.append(svg.text(box.words, left + room / 2, baseline, "in-span", "middle"))
    return svg.element("g", *drawn, class_="lanes")
