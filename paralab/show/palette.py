"""Colors and textures for each kind of work, the same in all charts.

Textures distinguish the kinds where color cannot. Compute is plain or faintly striped,
communication is striped, and waiting is dotted. Exposed communication is hatched in the warning
color.
"""

from collections.abc import Iterable
from html import escape

from paralab.show.svg import rect

Legend = list[tuple[str, str]]  # swatches and their texts
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
    "all_to_all": ("all-to-all", "slope"),
    "scatter": ("scatter", "fall"),
    "replicate": ("replicate", "down"),
    "gather": ("gather", "rise"),
    "reduce": ("reduce", "fall"),
    "wait": ("waiting", "dots"),
    "other": ("other", "plain"),
    "skew": ("skew: ranks start and end at different times", "across"),
    "compute": ("compute", "plain"),
    "parameters": ("parameters", "plain"),
    "gradients": ("gradients", "slope"),
    "activations": ("activations", "across"),
    "samples": ("samples", "plain"),
    "difference": ("difference between ideal and measured", "hatch"),
    "exposed": ("exposed communication", "hatch"),
    "bubble": ("bubble: the stage is idle", "hatch"),
}
STRIPES = {
    "plain": (8, 0, ""),  # (period in px, degrees, path)
    "slope": (9, 30, "M0 0V9"),
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


def kinds_legend(kinds: Iterable[str]) -> Legend:
    swatch = "span is-{}".format
    return [(rect(swatch(k), 0.5, 0.5, 25, 11, fill=fill(k)), LEGEND[k][0]) for k in kinds]


def legend_html(legend: Legend) -> str:
    """Return a legend for a page, where it wraps on a phone."""
    items = (
        f'<li><svg viewBox="0 0 26 12" aria-hidden="true">{swatch}</svg>{escape(words)}</li>'
        for swatch, words in legend
    )
    return f'<ul class="legend">{"".join(items)}</ul>' if legend else ""
