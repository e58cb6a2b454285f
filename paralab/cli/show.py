"""`paralab show`: print tables and write pages for recorded runs, without torch."""

from pathlib import Path

import click

from paralab.cli.command import Command
from paralab.cli.options import JSON, emit, flag
from paralab.errors import UsageError
from paralab.launch.run_options import OUTPUT
from paralab.show.visible import echo

FILE = click.Path(path_type=Path)


@click.command(cls=Command, short_help="Show recorded runs as tables or as a page.")
@click.argument("folders", nargs=-1, required=True, type=FILE, metavar="RUN_FOLDER...")
@flag("--report", OUTPUT, "Write the HTML page to FILE.", type=FILE, metavar="FILE")
@flag("--markdown", OUTPUT, "Write the tables and answers to FILE.", type=FILE, metavar="FILE")
@flag("--all everything", OUTPUT, "Print every table, not only the first.")
@JSON
def show(
    folders: tuple[Path, ...],
    report: Path | None,
    markdown: Path | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Show recorded runs. paralab recomputes all results from the recorded events and does not need
    torch.

    Several separate runs are shown side by side.
    """
    from paralab.record.folder import write_new
    from paralab.show.document import print_document, print_summary
    from paralab.show.markdown import as_markdown
    from paralab.show.open_folder import document_of, document_of_runs
    from paralab.show.page import render

    try:
        document = document_of(folders[0]) if len(folders) == 1 else document_of_runs(folders)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        named = ", ".join(map(str, folders))
        raise UsageError(
            f"{named} is damaged: {type(error).__name__}: {error}.",
            fix="a run folder that has not been edited",
        ) from error

    for path, text in ((report, render), (markdown, as_markdown)):
        if path:
            write_new(path, text(document))
            echo(f"Wrote {path}", err=True)
    emit(document, as_json, print_document if everything else print_summary)
