"""Render the page: one self-contained HTML file. It opens from a disk, an email, or a web server,
without network access.

The page contains one copy of the document's JSON, and the script shows parts of it on demand.
Tables, answers, and charts are rendered here, so they work without scripts, on paper, and in the
source.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from paralab.analyse import blocks
from paralab.analyse.blocks import Block, Cell, Document, Table
from paralab.errors import ParalabError
from paralab.show.chart_bars import draw_bars, draw_distribution
from paralab.show.chart_explore import draw_start, explore_legend
from paralab.show.chart_lines import draw_lines, lines_legend
from paralab.show.chart_schedule import draw_schedule, schedule_legend
from paralab.show.chart_shares import draw_shares, shares_legend
from paralab.show.chart_split import draw_split
from paralab.show.chart_timeline import draw_timeline, timeline_legend
from paralab.show.explore import control_words, start_of
from paralab.show.open_folder import document_of
from paralab.show.palette import LEGEND, STRIPES, Legend, legend_html
from paralab.show.svg import NARROW, WIDE
from paralab.show.visible import visible
from paralab.units import measure

Draw = Callable[[Any, str, int], str]
DRAW: dict[type[Block], tuple[Draw, Callable[[Any], Legend]]] = {  # the chart and its legend
    blocks.Bars: (draw_bars, lambda block: []),
    blocks.Distribution: (draw_distribution, lambda block: []),
    blocks.Explorable: (draw_start, explore_legend),
    blocks.Lines: (draw_lines, lines_legend),
    blocks.Schedule: (draw_schedule, schedule_legend),
    blocks.Shares: (draw_shares, shares_legend),
    blocks.Split: (draw_split, lambda block: []),
}
UNITS = ("seconds", "bytes", "share")  # a name's last word is its unit: `step_seconds`
# Words with a hyphen. One of up to 28 characters fits on a phone.
HYPHENATED = re.compile(r"(?<!\S)(?=\S{1,28}(?!\S))\S*-\S*")
MOST_LISTED = 12  # numbers shown per list; the JSON has all of them


def render(document: Document) -> str:
    """Render the complete page. The same document always gives the same bytes."""
    page = (
        page_environment("show")
        .get_template("page.html.j2")
        .render(
            document=document,
            data=Markup(embedded(document.to_dict())),
            kind=lambda block: type(block).__name__.lower(),
            draw=draw,
            start=start_of,
            control_words=control_words,
            color=finding_color,
            explores=any(section.of(blocks.Explorable) for section in document.page_sections),
        )
    )
    return visible(page)


def page_environment(*folders: str) -> Environment:
    """Return an environment for the templates in these folders, with the charts' textures."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("paralab", folder) for folder in folders]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": prose, "exact": exact, "evidence": evidence_words}
    environment.filters |= {"words": cell_words, "numeric": numeric_columns}
    environment.filters |= {"unbroken": unbroken, "hyphenated": hyphenated}
    environment.tests["unknown"] = is_unknown
    textures = {kind: STRIPES[stripe] for kind, (_, stripe) in LEGEND.items()}
    environment.globals["textures"] = textures
    return environment


def write_report(folder: Path, document: Document | None = None) -> Path:
    """Write report.html into a paralab folder."""
    page, beside = folder / "report.html", folder / "report.part"
    try:
        beside.write_text(render(document or document_of(folder)), encoding="utf-8")
        beside.replace(page)
    except OSError as error:
        beside.unlink(missing_ok=True)
        problem = f"Cannot write {page}: {error.strerror}."
        raise ParalabError(problem, fix=f"paralab show {folder} --report FILE") from error
    return page


def finding_color(finding: blocks.Finding) -> str:
    """Return a finding's kind. `same` is green only if every configuration was checked and is
    equal, and a warning if one is wrong. It is neither if all others match their simulation."""
    found = finding.evidence
    equal, simulated, of = (found.get(name, 0) for name in ("equal", "as_simulated", "of"))
    if finding.kind != "same" or (of and equal == of):
        return finding.kind
    return "warning" if equal + simulated < of else "other"


def draw(block: Block, name: str) -> Markup:
    """Draw a chart with its legend. Each chart is drawn twice, for a desktop and for a phone,
    except the timeline, which the script fits to the available width."""
    if isinstance(block, blocks.Timeline):
        return Markup(legend_html(timeline_legend(block)) + draw_timeline(block, name))
    draw_chart, legend = DRAW[type(block)]
    wide, narrow = (draw_chart(block, f"{name}-{width}", width) for width in (WIDE, NARROW))
    if "<svg" not in wide:  # nothing to draw
        return Markup(wide)
    return Markup(legend_html(legend(block)) + wide + narrow)


def embedded(value: Any) -> str:
    """Return JSON for a script element. It contains no `<`, so it cannot close the element."""
    text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def plain(value: Any) -> Any:
    """Convert to what JSON can represent: NaN becomes null, and other objects become text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def exact(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False)


def cell_words(cell: Cell) -> str:
    """Return a cell's text, or else its value, or else `not measured`."""
    return cell.text or ("not measured" if cell.value is None else str(cell.value))


def is_unknown(cell: Cell) -> bool:
    """Return whether a cell says that its number is unknown: `not measured: …`, `–`."""
    return cell.value is None and cell_words(cell).startswith(("not ", "–", "unknown"))


def hyphenated(words: str) -> Markup:
    """Return escaped text whose lines do not break after a hyphen: `--micro-batches`, `1e-03`."""
    return Markup(HYPHENATED.sub(r'<span class="unbroken">\g<0></span>', str(escape(words))))


def unbroken(name: str) -> Markup:
    """Return a configuration's name, which a table may only break between its parts:
    `ddp ×2 · accumulate 4 · bf16`."""
    *others, last = name.split(" · ")
    parts = [f"{part} ·" for part in others] + [last]
    spans = [Markup("<span>{}</span>").format(part) for part in parts]
    return Markup(" ").join(spans) if others else hyphenated(name)


def numeric_columns(table: Table) -> list[bool]:
    """Return which columns are right-aligned: they have numbers and no other known values."""
    columns = range(len(table.columns))
    kinds = [{type(row[n].value) for row in table.rows if n < len(row)} for n in columns]
    return [bool(found & {int, float}) and found <= {int, float, type(None)} for found in kinds]


def prose(words: str) -> Markup:
    """Return escaped text, with text in backquotes as a code element."""
    parts = map(hyphenated, re.split(r"`([^`]+)`", words))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts)
    )


def evidence_words(value: Any, name: str) -> str:
    """Format a piece of evidence in the unit that its name ends with."""
    if isinstance(value, (list, tuple)):
        more = f", … ({len(value)} in total)" if len(value) > MOST_LISTED else ""
        return ", ".join(_words(item, name) for item in value[:MOST_LISTED]) + more or "none"
    return _words(value, name)


def _words(value: Any, name: str) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    unit = name.rpartition("_")[2]
    if isinstance(value, float) or (isinstance(value, int) and unit in UNITS):
        return measure(value, unit if unit in UNITS else "number")
    return exact(value) if isinstance(value, (dict, list, tuple)) else str(value)
