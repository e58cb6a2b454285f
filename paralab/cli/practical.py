"""`paralab practical`: one sub-command per practical, and `check` for course organizers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paralab.errors import UsageError, naming
from paralab.plan.request import Request
from paralab.record.folder import write_new
from paralab.show.visible import echo

if TYPE_CHECKING:
    from paralab.analyse.blocks import Document

TITLES = {  # here too, so that --help needs no analysis; a test holds both together
    5: "data parallelism with nn.DataParallel",
    6: "DistributedDataParallel and collective communication",
    7: "DDP optimisation and debugging",
    10: "hybrid parallelism: data, model, pipeline",
}
FOLDER = click.Path(file_okay=False, path_type=Path)
SHEET = click.Path(dir_okay=False, path_type=Path, allow_dash=True)

OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--part", type=int, help="Run one part alone, with only the set-ups that it needs."
    ),
    click.option(
        "--workload",
        metavar="NAME|FILE.py:FUNCTION",
        default="mlp",
        show_default=True,
        help="What is trained.",
    ),
    click.option("--batch-size", type=int, help="Samples per optimizer step over ALL devices."),
    click.option(
        "--device",
        metavar="auto|cpu|cuda",
        default="auto",
        show_default=True,
        help="Where the devices are taken from.",
    ),
    click.option(
        "--rounds",
        type=click.IntRange(1),
        help="How often every set-up is measured. [default: 5 or 7]",
    ),
    click.option(
        "--steps",
        type=click.IntRange(2),
        help="Optimizer steps of a set-up in one round. [default: 10 to 20]",
    ),
    click.option("--markdown", type=SHEET, help="Write the lab sheet to this file; - prints it."),
    click.option(
        "--blank",
        type=SHEET,
        help="Write the sheet with empty cells, to hand out, to this file; - prints it.",
    ),
    click.option(
        "--run",
        "run_folder",
        type=FOLDER,
        help="Measure nothing: tell from this folder of an earlier run.",
    ),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print one JSON object on stdout, and nothing else there.",
    ),
    click.option(
        "--out", metavar="DIR", type=FOLDER, help="The run folder. [default: runs/DATE_TIME_…]"
    ),
]


class InOrder(click.Group):
    """Practical 5 before practical 10."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder, short_help="A practical of the course, run and filled in.")
def practical() -> None:
    """Run a practical of the course from start to end: its tables filled, its questions answered
    from what was measured.

    \b
    paralab practical 5                     practical 5, all parts
    paralab practical 7 --part 3            one part
    paralab practical 6 --markdown my.md    a lab sheet to hand in
    paralab practical check 5 sheet.md      does a student's sheet agree with the run?
    """


def _add(number: int, title: str) -> None:
    def command(
        as_json: bool,
        markdown: Path | None,
        blank: Path | None,
        run_folder: Path | None,
        **options: Any,
    ) -> None:
        if as_json and "-" in (str(markdown), str(blank)):
            raise UsageError("--json and - both print on stdout.", fix="a file name instead of -")
        for path in (markdown, blank):
            if path and str(path) != "-" and path.exists():
                raise UsageError(
                    f"{path} exists already; paralab overwrites nothing.", fix="another name"
                )
        given = [
            name
            for name in ("part", "batch_size", "rounds", "steps", "out")
            if options[name] is not None
        ]
        if run_folder and given:
            raise UsageError(
                f"--run tells an earlier run, so --{given[0].replace('_', '-')} means nothing.",
                fix="one of the two",
            )
        document, folder = _told(
            number, run_folder, as_json or str(markdown) == "-" or str(blank) == "-", options
        )
        if blank:
            from paralab.course.check import emptied
            from paralab.show.markdown import as_markdown

            _write(blank, as_markdown(emptied(document)))
        if markdown:
            from paralab.show.markdown import as_markdown

            _write(markdown, as_markdown(document))
        if as_json:
            click.echo(json.dumps({**document.to_json(), "run_folder": str(folder)}))
        elif "-" not in (str(markdown), str(blank)):
            from paralab.show.document import print_document

            print_document(document)
            echo(f"\nThe page: {folder / 'report.html'}   the lab sheet: {folder / 'sheet.md'}")
        if not any(section.blocks for section in document.sections):
            sys.exit(1)  # every part lacks its set-ups

    command.__doc__ = f"Practical {number}: {title}."
    for option in reversed(OPTIONS):
        command = option(command)
    practical.command(name=str(number))(command)


for _number, _title in TITLES.items():
    _add(_number, _title)


def _told(
    number: int, run_folder: Path | None, quiet: bool, options: dict[str, Any]
) -> tuple[Document, Path]:
    """Run it, or read an earlier run; either way page and sheet are in the folder afterwards."""
    from paralab.course import practical as practicals
    from paralab.course.sheet import document_of
    from paralab.show.markdown import as_markdown
    from paralab.show.page import render

    if run_folder:
        _right_number(number, run_folder)
        document, folder = document_of(run_folder), run_folder
    else:
        base = Request(
            "single",
            workload=options["workload"],
            batch_size=options["batch_size"],
            device=options["device"],
        )
        kept = {name: options[name] for name in ("rounds", "steps", "out")}
        say = (lambda line: None) if quiet else (lambda line: echo(line, err=True))
        document, folder = practicals.run(number, options["part"], base=base, say=say, **kept)
    for name, text in (("report.html", render), ("sheet.md", as_markdown)):
        if not (folder / name).exists():
            with naming(folder / name):
                (folder / name).write_text(text(document), encoding="utf-8")
    return document, folder


def _right_number(number: int, folder: Path) -> None:
    from paralab.course.sheet import number_of

    found = number_of(folder)
    if found != number:
        what = f"a run of practical {found}" if found else "no run of a practical"
        raise UsageError(
            f"{folder} is {what}, not of practical {number}.",
            fix=f"paralab practical {found or number} …",
        )


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        echo(text, nl=False)
        return
    write_new(path, text)


@practical.command()
@click.argument("number", type=int)
@click.argument("sheet", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--run",
    "run_folder",
    type=FOLDER,
    help="The run that the sheet is held against. [default: the newest under runs/]",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 10),
    default=0.25,
    show_default=True,
    help="By how much a measured time may lie outside p10–p90.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object on stdout, and nothing else there.",
)
def check(
    number: int, sheet: Path, run_folder: Path | None, tolerance: float, as_json: bool
) -> None:
    """Which values of a filled-in SHEET (Markdown) contradict the run, and why.

    Counts, splits, names and sizes must be equal. Times may lie anywhere in p10–p90, widened by the
    tolerance. Exit code 0: no contradiction, 1: some, 2: wrong use.
    """
    from paralab.course.check import compared
    from paralab.course.practical import newest
    from paralab.course.sheet import document_of, find
    from paralab.show.sheet_check import print_checked

    find(number)
    folder = run_folder or newest(number)
    _right_number(number, folder)
    try:
        text = sheet.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{sheet} cannot be read: {error}.",
            fix="a Markdown file, as `paralab practical N --blank FILE` makes",
        ) from error
    result = {
        "practical": number,
        "sheet": str(sheet),
        "run_folder": str(folder),
        **compared(text, document_of(folder), tolerance),
    }
    click.echo(json.dumps(result)) if as_json else print_checked(result)
    sys.exit(1 if result["contradictions"] else 0)
