"""Colors and textures for each kind of work, the same in all charts.

Textures distinguish the kinds where color cannot: compute is plain or faintly striped,
communication is striped, waiting is dotted, and exposed communication is hatched in the warning
color.
"""

from __future__ import annotations

from paralab.show.svg import element

# kind -> legend text and stripe direction
LEGEND = {
    "forward": ("forward", "plain"),
    "backward": ("backward", "slope"),
    "weights": ("backward, weights only", "across"),
    "optimizer": ("optimizer", "plain"),
    "data": ("data", "across"),
    "all_reduce": ("all-reduce", "rise"),
    "all_gather": ("all-gather", "down"),
    "reduce_scatter": ("reduce-scatter", "fall"),
    "scatter": ("scatter", "fall"),
    "replicate": ("replicate", "down"),
    "gather": ("gather", "rise"),
    "reduce": ("reduce", "fall"),
    "wait": ("waiting", "dots"),
    "other": ("other", "plain"),
    "exposed": ("exposed communication", "hatch"),
    "bubble": ("bubble: the stage is idle", "hatch"),
}
STRIPES = {
    "slope": (9, 30, "M0 0V9"),  # (period in px, degrees, path)
    "rise": (5, 45, "M0 0V5"),
    "fall": (5, -45, "M0 0V5"),
    "down": (5, 0, "M0 0V5"),
    "across": (5, 90, "M0 0V5"),
    "dots": (5, 45, "M1.5 2.5h1.2"),
    "hatch": (6, 45, "M0 0V6"),
}


def kind_of(kind: str) -> str:
    return kind if kind in LEGEND else "other"


def fill(kind: str) -> str:
    return f"url(#paint-{kind_of(kind)})"


def textures() -> str:
    """Return all patterns, once per page, in an SVG without a size. (Browsers do not paint patterns
    from an SVG that is not displayed.)"""
    return element(
        "svg",
        element("defs", *map(_texture, LEGEND)),
        class_="paints",
        aria_hidden="true",
        width=0,
        height=0,
    )


def _texture(kind: str) -> str:
    period, degrees, path = STRIPES.get(LEGEND[kind][1], (8, 0, ""))
    stripe = element("path", class_=f"stripe stripe-{kind}", d=path) if path else ""
    ground = element("rect", class_=f"tone-{kind}", width=period, height=period)
    turned = f"rotate({degrees})" if degrees else None
    size = str(period)
    return element(
        "pattern",
        ground,
        stripe,
        id=f"paint-{kind}",
        width=size,
        height=size,
        patternUnits="userSpaceOnUse",
        patternTransform=turned,
    )


def swatch(kind: str) -> tuple[str, str]:
    """Return a legend entry: a swatch and the name of the kind."""
    box = element(
        "rect", class_=f"span is-{kind}", x=0.5, y=0.5, width=25, height=11, rx=2, fill=fill(kind)
    )
    return box, LEGEND[kind][0]
