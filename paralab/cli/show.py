"""`paralab show`: print tables and write pages for recorded runs, without torch."""

from pathlib import Path
from typing import Any

import click

from paralab.cli.command import Command
from paralab.cli.options import FILE, JSON, emit, flag
from paralab.errors import DAMAGED, UsageError
from paralab.launch.run_options import OUTPUT
from paralab.show.visible import echo

THEME: dict[str, Any] = {"type": click.Choice(("light", "dark")), "default": "light"}
FOLDERS: dict[str, Any] = {"nargs": -1, "required": True, "metavar": "RUN_FOLDER..."}


@click.command(cls=Command, short_help="Show recorded runs as tables or as a page.")
@click.argument("folders", type=click.Path(path_type=Path), **FOLDERS)
@flag("--report", OUTPUT, "Write the HTML page to FILE.", **FILE)
@flag("--markdown", OUTPUT, "Write the tables and answers to FILE.", **FILE)
@flag("--figure", OUTPUT, "Export this chart; if NAME is unknown, list all charts.", metavar="NAME")
@flag("--svg", OUTPUT, "Write the figure to FILE as SVG.", **FILE)
@flag("--png", OUTPUT, "Write the figure to FILE as PNG (needs Chromium).", **FILE)
@flag("--theme", OUTPUT, "Colors of the figure.", "light", **THEME)
@flag("--all everything", OUTPUT, "Print every table, not only the first.")
@JSON
def show(
    folders: tuple[Path, ...],
    report: Path | None,
    markdown: Path | None,
    figure: str | None,
    svg: Path | None,
    png: Path | None,
    theme: str,
    everything: bool,
    as_json: bool,
) -> None:
    """Show recorded runs. paralab recomputes all results from the recorded events and does not need
    torch.

    Pass multiple runs to see them side by side.

    paralab show runs/ddp --figure timeline --svg timeline.svg
    """
    if bool(figure) != bool(svg or png):
        problem = (
            "--figure needs an output file (--svg or --png), and an output file needs --figure."
        )
        raise UsageError(problem, fix="--figure NAME --svg FILE")
    from paralab.record.folder import write_new
    from paralab.show.document import print_document, print_summary
    from paralab.show.markdown import as_markdown
    from paralab.show.open_folder import document_of, document_of_runs
    from paralab.show.page import render

    try:
        document = document_of(folders[0]) if len(folders) == 1 else document_of_runs(folders)
    except DAMAGED as error:
        named = ", ".join(map(str, folders))
        problem = f"{named} is damaged: {type(error).__name__}: {error}."
        raise UsageError(problem, fix="a run folder that has not been edited") from error

    for path, text in ((report, render), (markdown, as_markdown)):
        if path:
            write_new(path, text(document))
            echo(f"Wrote {path}", err=True)
    if figure:
        from paralab.show.figure import as_png, as_svg, find_figure, write_figure

        drawing = as_svg(find_figure(document, figure), theme)
        if svg:
            write_figure(svg, drawing)
        if png:
            write_figure(png, as_png(drawing))
        for path in filter(None, (svg, png)):
            echo(f"Wrote {path}", err=True)
    emit(document, as_json, print_document if everything else print_summary)
