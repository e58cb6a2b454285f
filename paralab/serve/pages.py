"""Render the pages and their parts. Later events replace the parts that changed."""

import time
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment

from paralab.analyse.blocks import Lines, Timeline
from paralab.serve.class_table import ClassTable
from paralab.serve.runs import Row
from paralab.serve.state import Snapshot
from paralab.show.chart_lines import draw_lines
from paralab.show.chart_timeline import draw_timeline, timeline_legend
from paralab.show.page import page_environment
from paralab.show.palette import legend_html
from paralab.show.svg import NARROW, nothing
from paralab.show.visible import visible
from paralab.units import age, plural, rate, seconds, size

SCRIPT, STYLES = "serve.js", ("page.css", "serve.css")
CURVE_WIDTH, TIMELINE_WIDTH = 570, 1180  # px on a desktop, where two curves fit side by side
MOST_ROWS = 1000  # with more rows, a browser becomes slow


@cache
def _environment() -> Environment:
    environment = page_environment("serve", "show")
    environment.filters |= {"seconds": seconds, "size": size, "rate": rate, "age": age}
    environment.filters |= {"moment": moment}
    environment.globals |= {"link": link, "plural": plural}
    return environment


def render(template: str, **values: Any) -> str:
    return visible(_environment().get_template(f"{template}.html.j2").render(**values))


def link(page: str, **query: str) -> str:
    """`link("run", name="a b")` -> `/run?name=a+b`."""
    return f"/{page}?{urlencode(query)}"


def moment(unix_seconds: float) -> str:
    """Format a time on this machine's clock: without the date if it was today."""
    then, today = datetime.fromtimestamp(unix_seconds), datetime.fromtimestamp(time.time())
    return then.strftime("%H:%M:%S" if then.date() == today.date() else "%Y-%m-%d %H:%M")


def asset(name: str) -> str:
    """Return a style sheet or the script. The styles begin with those of the report."""
    package = Path(__file__).parent
    folder = package.parent / "show" if name == "page.css" else package
    return (folder / name).read_text(encoding="utf-8")


def list_parts(rows: Sequence[Row], experiment: str = "") -> dict[str, object]:
    """Return rows keyed by name, so that the page keeps the user's selection."""
    shown = []
    for row in rows[:MOST_ROWS]:
        title = row.name.removeprefix(f"{experiment}/") if experiment else row.name
        shown.append((row.name, render("row", row=row, title=title).strip()))
    hidden = len(rows) - len(shown)
    note = f"This list shows the newest {MOST_ROWS:,} of {len(rows):,} runs." if hidden else ""
    return {"rows": shown, "count": plural(len(rows), "folder"), "note": note}


def run_parts(snapshot: Snapshot) -> dict[str, object]:
    parts: dict[str, object] = {
        name: render(f"run_{name}", run=snapshot)
        for name in ("status", "numbers", "ranks", "findings")
    }
    return parts | {
        "losses": _draw_lines(snapshot.losses, "losses"),
        "step_times": _draw_lines(snapshot.step_times, "step-times"),
        "timeline": _draw_timeline(snapshot.timeline),
    }


def class_parts(table: ClassTable) -> dict[str, object]:
    return {"grades": render("class_grades", table=table)}


def _draw_lines(lines: Lines | None, name: str) -> str:
    if lines is None:
        return nothing("no step has finished yet")
    return "".join(draw_lines(lines, f"{name}-{width}", width) for width in (CURVE_WIDTH, NARROW))


def _draw_timeline(timeline: Timeline | None) -> str:
    if timeline is None:
        return nothing("no step recorded in detail has finished yet")
    widths = (TIMELINE_WIDTH, NARROW)
    charts = (draw_timeline(timeline, f"timeline-{width}", width) for width in widths)
    return legend_html(timeline_legend(timeline)) + "".join(charts)
