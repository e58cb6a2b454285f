"""Show results in a notebook: a short `repr`, and a table and a chart as HTML.

The chart is an image for each theme, so its colors, fonts, and ids cannot clash with the notebook
or with other outputs, and it cannot run scripts. Text from a run folder is escaped.
"""

import base64
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from paralab.analyse.blocks import Document, Table
from paralab.analyse.compare import Comparison
from paralab.analyse.result import Result
from paralab.analyse.tune import TuneResult
from paralab.analyse.verify import VerifyResult
from paralab.errors import ParalabError
from paralab.units import plural, seconds

Shown = Result | Comparison | VerifyResult | TuneResult | Document
MOST_ROWS, MOST_BYTES = 30, 60_000  # limits for a table and for a drawing
# If a document has multiple charts, show the first one from this list.
FIRST = ("speed-up", "step-time-over-bucket-size", "shares")
# Follow the notebook's theme (JupyterLab, VS Code, Colab), or else the browser's.
STYLE = """<style>
.paralab { overflow-x: auto } .paralab table { border-collapse: collapse; margin: 0.5em 0 }
.paralab :is(th, td) { padding: 0.25em 0.9em 0.25em 0; text-align: left; border-bottom: 1px solid #8884 }
.paralab .number { text-align: right; white-space: nowrap } .paralab img { max-width: 100% } .paralab p { margin: 0.3em 0 }
@media (prefers-color-scheme: dark) { :root:not([theme=light]) body:not([data-jp-theme-light=true], .vscode-light) .paralab {
  & .light { display: none !important } & .dark { display: block !important } } }
:is([data-jp-theme-light=false], .vscode-dark, [theme=dark]) .paralab {
  & .light { display: none !important } & .dark { display: block !important } }
</style>"""


def describe(result: Shown) -> str:
    """Return a one-line `repr`. The fields are in `result.to_dict()`."""
    folder = result.run_folder
    if isinstance(result, Result):
        time = result.step_seconds and seconds(result.step_seconds.median)
        what = f"{result.strategy} trains {result.workload}: {result.status}, "
        what += f"{plural(result.steps, 'step')}, {time or 'no time'} per step"
    elif isinstance(result, Comparison):
        what = f"{plural(len(result.rows), 'configuration')} of {result.workload.name}"
    elif isinstance(result, VerifyResult):
        equal = sum(each.equal for each in result.configurations)
        simulated = sum(each.as_simulated is True for each in result.configurations)
        what = f"{equal} of {plural(len(result.configurations), 'configuration')} equal"
        what += f", {simulated} as simulated" if simulated else ""
    else:
        what = result.title if isinstance(result, Document) else f"fastest is {result.chosen.name}"
    return f"<{type(result).__name__}: {what}; run_folder={folder!r}>"


def as_html(result: Shown) -> str:
    """Return the title, the verdict, the first table, and the most useful chart."""
    # Imported here, so that a script that prints nothing does not wait for jinja2.
    from paralab.show.figure import as_svg, name_figures
    from paralab.show.open_folder import document_of
    from paralab.show.page import prose
    from paralab.show.visible import visible

    try:
        document = result if isinstance(result, Document) else document_of(Path(result.run_folder))
    except ParalabError as error:  # the folder was moved or deleted
        return f"<pre>{escape(visible(f'{describe(result)} {error.problem}'))}</pre>"
    charts = name_figures(document)
    if not charts and isinstance(result, Document) and result.run_folder:
        with suppress(ParalabError):
            charts = name_figures(_comparison_document(Path(result.run_folder)))

    parts = [f"<p><strong>{escape(document.title)}</strong> {escape(document.subtitle)}</p>"]
    parts += [f"<p>{prose(each.text)}</p>" for each in document.findings[:2]]
    tables = [each for section in document.sections for each in section.of(Table) if each.rows]
    if tables:
        # The first table of a run or a comparison is its summary. A sheet has no summary table.
        largest = max(tables, key=lambda table: len(table.rows) * len(table.columns))
        parts.append(_table(largest if isinstance(result, Document) else tables[0]))
    order = sorted(charts, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    for name in order:
        try:
            drawings = {theme: as_svg(charts[name], theme) for theme in ("light", "dark")}
        except ParalabError:  # nothing was measured
            continue
        if len(drawings["light"]) <= MOST_BYTES:
            parts += [_image(theme, each, name) for theme, each in drawings.items()]
            break
    if folder := result.run_folder:
        parts.append(f"<p><small>Run folder: {escape(folder)}</small></p>")
    return visible(f'{STYLE}<div class="paralab">{"".join(parts)}</div>')


def _comparison_document(folder: Path) -> Document:
    from paralab.analyse.compare import comparison_of
    from paralab.analyse.report import report

    comparison = comparison_of(folder)
    rows = [row for row in comparison.rows if row.speed_up]
    return report(replace(comparison, rows=rows), folder)


def _table(table: Table) -> str:
    from paralab.show.page import page_environment

    macros: Any = page_environment("show").get_template("table.html.j2").module
    html = macros.table(replace(table, rows=table.rows[:MOST_ROWS]), table.title)
    more = len(table.rows) - MOST_ROWS
    return f"{html}<p>{plural(more, 'more row')} in the full report.</p>" if more > 0 else str(html)


def _image(theme: str, drawing: str, name: str) -> str:
    data = base64.b64encode(drawing.encode()).decode()
    hidden = ' style="display: none"' if theme == "dark" else ""
    source = f"data:image/svg+xml;base64,{data}"
    return f'<img class="{theme}"{hidden} alt="{escape(name)}" src="{source}">'
