"""`paralab show`: print tables and write pages for recorded runs, without torch."""

from pathlib import Path

import click

from paralab.cli.command import Command
from paralab.cli.options import JSON, emit, flag
from paralab.errors import UsageError
from paralab.launch.run_options import OUTPUT
from paralab.show.visible import echo

THEMES = ("light", "dark")
FILE = click.Path(path_type=Path)


@click.command(cls=Command, short_help="Show recorded runs as tables or as a page.")
@click.argument("folders", nargs=-1, required=True, type=FILE, metavar="RUN_FOLDER...")
@flag("--report", OUTPUT, "Write the HTML page to FILE.", type=FILE, metavar="FILE")
@flag("--markdown", OUTPUT, "Write the tables and answers to FILE.", type=FILE, metavar="FILE")
@flag(
    "--figure",
    OUTPUT,
    "Export this chart; if NAME is unknown, list all charts.",
    metavar="NAME",
    type=str,
)
@flag("--svg", OUTPUT, "Write the figure to FILE as SVG.", type=FILE, metavar="FILE")
@flag(
    "--png", OUTPUT, "Write the figure to FILE as PNG (needs Chromium).", type=FILE, metavar="FILE"
)
@flag(
    "--theme", OUTPUT, "Colors of the figure.", "light", type=click.Choice(THEMES), default="light"
)
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

    Several separate runs are shown side by side.

    paralab show runs/ddp --figure timeline --svg timeline.svg
    """
    if bool(figure) != bool(svg or png):
        raise UsageError(
            "--figure says which chart, and --svg or --png says where to write it.",
            fix="--figure NAME --svg FILE",
        )
    from paralab.record.folder import write_new
    from paralab.show.document import print_document, print_summary
    from paralab.show.markdown import as_markdown
    from paralab.show.open_folder import document_of, document_of_runs
    from paralab.show.page import render

    try:
        document = document_of(folders[0]) if len(folders) == 1 else document_of_runs(folders)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
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
