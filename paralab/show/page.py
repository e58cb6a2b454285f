"""Render the page: one self-contained HTML file that opens from a disk, an email, or a web server
and needs no network.

The page contains the document's JSON once; the script shows parts of it on demand. Tables, answers,
and charts are rendered here, so they work without scripts, on paper, and in the source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from paralab.analyse.blocks import (
    Bars,
    Block,
    Cell,
    Distribution,
    Document,
    Evidence,
    Lines,
    Schedule,
    Split,
    Table,
    Timeline,
)
from paralab.errors import ParalabError
from paralab.show.chart_bars import draw_bars, draw_distribution
from paralab.show.chart_lines import draw_lines, lines_legend
from paralab.show.chart_schedule import draw_schedule, schedule_legend
from paralab.show.chart_split import draw_split
from paralab.show.chart_timeline import draw_timeline, timeline_legend
from paralab.show.open_folder import document_of
from paralab.show.palette import textures
from paralab.show.svg import NARROW, WIDE
from paralab.show.visible import visible
from paralab.units import measure

DRAW: dict[type[Any], Callable[[Any, str, int], str]] = {
    Bars: draw_bars,
    Distribution: draw_distribution,
    Lines: draw_lines,
    Schedule: draw_schedule,
    Split: draw_split,
}
FINDINGS = {
    "fastest": "Fastest",
    "cost": "Cost",
    "limit": "Limit",
    "next": "Try next",
    "warning": "Warning",
    "same": "Same training",
}
UNITS = {
    "seconds": "seconds",
    "bytes": "bytes",
    "share": "share",
}  # a name's last word is its unit
MOST_LISTED = 12  # numbers per list; the JSON has all of them


def render(document: Document) -> str:
    """Render the complete page. The same document always gives the same bytes."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        prose=prose, value=value_json, words=cell_words, evidence=evidence, numeric=numeric_columns
    )
    page = environment.from_string(_file("page.html.j2")).render(
        document=document,
        css=Markup(_file("page.css")),
        js=Markup(_file("page.js")),
        data=Markup(embedded(document.to_dict())),
        finding_names=FINDINGS,
        kind=lambda block: type(block).__name__.lower(),
        draw=draw,
        textures=Markup(textures()),
    )
    return visible(page)


def write_report(folder: Path, document: Document | None = None) -> Path:
    """Write report.html into a paralab folder."""
    page, beside = folder / "report.html", folder / "report.part"
    try:
        beside.write_text(render(document or document_of(folder)), encoding="utf-8")
        beside.replace(page)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ParalabError(
            f"Cannot write {page}: {error.strerror}.",
            fix=f"paralab show {folder} --report FILE",
        ) from error
    return page


def _file(name: str) -> str:
    return files("paralab.show").joinpath(name).read_text(encoding="utf-8")


def draw(block: Block, name: str) -> Markup:
    """Draw a chart with its legend. Each chart is drawn for a desktop and for a phone, except the
    timeline, which the script fits to its place."""
    if isinstance(block, Timeline):
        return Markup(timeline_legend(block) + draw_timeline(block, name))
    wide, narrow = (DRAW[type(block)](block, f"{name}-{width}", width) for width in (WIDE, NARROW))
    if "<svg" not in wide:  # nothing to draw
        return Markup(wide)
    key = (
        lines_legend(block)
        if isinstance(block, Lines)
        else schedule_legend(block)
        if isinstance(block, Schedule)
        else ""
    )
    return Markup(key + wide + narrow)


def embedded(value: Any) -> str:
    """Return JSON for a script element. It contains no `<`, so it cannot end the element."""
    return json.dumps(
        plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False
    ).replace("<", "\\u003c")


def plain(value: Any) -> Any:
    """Convert a value to one that JSON can represent. A number that is not finite becomes null;
    other objects become text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def value_json(cell: Cell) -> str:
    return json.dumps(plain(cell.value), ensure_ascii=False)


def cell_words(cell: Cell) -> str:
    """Return a cell's text, or else its value, or else `not measured`."""
    if cell.text:
        return cell.text
    return "not measured" if cell.value is None else str(cell.value)


def numeric_columns(table: Table) -> list[bool]:
    """Return which columns are numeric and right-aligned. They have at least one number, and all
    other cells are unknown."""
    columns = [
        [row[n].value for row in table.rows if n < len(row)] for n in range(len(table.columns))
    ]
    return [
        any(value is not None for value in column)
        and all(
            value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
            for value in column
        )
        for column in columns
    ]


def prose(words: str) -> Markup:
    """Return escaped text, with `code` as a code element."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))


def evidence(numbers: Evidence) -> Markup:
    """Render evidence as names and numbers, with nested ones indented. `data-value` has the exact
    number."""
    return (
        Markup("<dl>")
        + Markup("").join(_item(str(name), value) for name, value in numbers.items())
        + Markup("</dl>")
    )


def _item(name: str, value: Any) -> Markup:
    if isinstance(value, dict):
        shown: Markup | str = evidence(value)
    elif isinstance(value, (list, tuple)):
        more = f", … ({len(value)} in total)" if len(value) > MOST_LISTED else ""
        shown = (
            ", ".join(_words(name, item) for item in value[:MOST_LISTED]) + more
            if value
            else "none"
        )
    else:
        shown = _words(name, value)
    return Markup('<dt>{}</dt><dd data-value="{}">{}</dd>').format(
        name, json.dumps(plain(value), ensure_ascii=False), shown
    )


def _words(name: str, value: Any) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return (
            str(value)
            if isinstance(value, int) and _unit(name) == "number"
            else measure(value, _unit(name))
        )
    return (
        json.dumps(plain(value), ensure_ascii=False)
        if isinstance(value, (dict, list, tuple))
        else str(value)
    )


def _unit(name: str) -> str:
    """Return a name's unit: seconds for `step_seconds`, bytes for `peak_bytes`, otherwise a
    number."""
    return UNITS.get(name.rpartition("_")[2], "number")
