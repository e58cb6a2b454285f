"""`paralab practical`: one command per practical, and `check` for course organizers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from paralab.cli.command import Group
from paralab.cli.compare import MEASUREMENT
from paralab.cli.options import JSON, OUT, flag, given, printer, request_options
from paralab.errors import UsageError, naming
from paralab.launch.run_options import OUTPUT
from paralab.plan.option import flag_of
from paralab.plan.request import Request
from paralab.record.folder import write_new
from paralab.show.visible import echo

if TYPE_CHECKING:
    from paralab.analyse.blocks import Document

TITLES = {  # repeated here so that --help needs no analysis; a test compares both
    5: "data parallelism with nn.DataParallel",
    6: "DistributedDataParallel and collective communication",
    7: "DDP optimisation and debugging",
    10: "hybrid parallelism: data, model, pipeline",
}
FOLDER = click.Path(file_okay=False, path_type=Path)
SHEET = click.Path(dir_okay=False, path_type=Path, allow_dash=True)


@click.group(cls=Group, short_help="Run a practical of the course and fill in its sheet.")
def practical() -> None:
    """Run a practical of the course. Its tables are filled in and its questions answered from the
    measurements.

    \b
    paralab practical 5                     run practical 5
    paralab practical 7 --part 3            run one part
    paralab practical 6 --markdown my.md    write a lab sheet to hand in
    paralab practical check 5 sheet.md      compare a student's sheet with a run
    """


def _add(number: int, title: str) -> None:
    """Add the command of one practical."""

    @practical.command(name=str(number), help=f"Practical {number}: {title}.")
    @request_options(
        "workload",
        "batch_size",
        "steps",
        "device",
        steps={"help": "Optimizer steps per configuration and round.", "shown": "10 to 20"},
    )
    @flag(
        "--part",
        MEASUREMENT,
        "Run only part N, with only the configurations it needs.",
        type=int,
        metavar="N",
    )
    @flag(
        "--rounds",
        MEASUREMENT,
        "Measure every configuration once per round.",
        shown="5 or 7",
        type=click.IntRange(1),
        metavar="N",
    )
    @flag(
        "--run run_folder",
        MEASUREMENT,
        "Measure nothing; use the measurements of an earlier run.",
        metavar="DIR",
        type=FOLDER,
    )
    @flag(
        "--markdown",
        OUTPUT,
        "Write the lab sheet to FILE; `-` prints it.",
        metavar="FILE",
        type=SHEET,
    )
    @flag(
        "--blank",
        OUTPUT,
        "Write the sheet with empty cells, to hand out, to FILE; `-` prints it.",
        metavar="FILE",
        type=SHEET,
    )
    @OUT
    @JSON
    def command(**options: Any) -> None:
        _run(number, **options)


for _number, _title in TITLES.items():
    _add(_number, _title)


def _run(
    number: int,
    as_json: bool,
    markdown: Path | None,
    blank: Path | None,
    run_folder: Path | None,
    **options: Any,
) -> None:
    """Measure, or read an earlier run; then write the sheets and print the document."""
    prints_sheet = "-" in (str(markdown), str(blank))
    _check(options, markdown, blank, run_folder, as_json and prints_sheet)
    document, folder = _open_or_run(number, run_folder, as_json or prints_sheet, options)

    if blank:
        from paralab.course.check import blank_sheet

        _write_sheet(blank, blank_sheet(document))
    if markdown:
        _write_sheet(markdown, document)
    if as_json:
        printed = replace(document, run_folder=str(folder))
        click.echo(json.dumps(printed.to_dict()))
    elif not prints_sheet:
        from paralab.show.document import print_document

        print_document(document)
        echo(f"\nPage: {folder / 'report.html'}   lab sheet: {folder / 'sheet.md'}")
    if not any(section.blocks for section in document.sections):
        sys.exit(1)  # no part has the configurations it needs


def _check(
    options: dict[str, Any],
    markdown: Path | None,
    blank: Path | None,
    run_folder: Path | None,
    prints_both: bool,
) -> None:
    """Refuse options that contradict each other, and files that exist, before measuring."""
    if prints_both:
        raise UsageError("--json and `-` both print on stdout.", fix="a file name instead of `-`")
    for path in (markdown, blank):
        if path and str(path) != "-" and path.exists():
            raise UsageError(
                f"{path} already exists, and paralab does not overwrite files.", fix="another name"
            )
    measuring = ("part", "batch_size", "rounds", "steps", "out")
    unused = [flag_of(name) for name in measuring if options[name] is not None]
    if run_folder and unused:
        raise UsageError(
            f"--run uses an earlier run, so {unused[0]} has no effect.",
            fix=f"leave out --run or {unused[0]}",
        )


def _open_or_run(
    number: int, run_folder: Path | None, quiet: bool, options: dict[str, Any]
) -> tuple[Document, Path]:
    """Run the practical or read an earlier run; write page and sheet into its folder."""
    from paralab.course import practical as practicals
    from paralab.course.sheet import document_of
    from paralab.show.markdown import as_markdown
    from paralab.show.page import render

    if run_folder:
        _require_number(number, run_folder)
        document, folder = document_of(run_folder), run_folder
    else:
        asked = {name: options[name] for name in ("workload", "batch_size", "device")}
        document, folder = practicals.run(
            number,
            options["part"],
            base=Request("single", **given(asked)),
            say=printer(quiet),
            rounds=options["rounds"],
            steps=options["steps"],
            out=options["out"],
        )

    for name, text in (("report.html", render), ("sheet.md", as_markdown)):
        if not (folder / name).exists():
            with naming(folder / name):
                (folder / name).write_text(text(document), encoding="utf-8")
    return document, folder


def _require_number(number: int, folder: Path) -> None:
    from paralab.course.sheet import number_of

    found = number_of(folder)
    if found != number:
        contents = f"a run of practical {found}" if found else "not a run of a practical"
        raise UsageError(
            f"{folder} is {contents}; practical {number} was expected.",
            fix=f"paralab practical {found or number} …",
        )


def _write_sheet(path: Path, document: Document) -> None:
    from paralab.show.markdown import as_markdown

    if str(path) == "-":
        echo(as_markdown(document), nl=False)
    else:
        write_new(path, as_markdown(document))


@practical.command(short_help="Compare a filled-in sheet with a run.")
@click.argument("number", type=int)
@click.argument("sheet", type=click.Path(dir_okay=False, path_type=Path))
@flag(
    "--run run_folder",
    MEASUREMENT,
    "The run to compare the sheet with.",
    shown="the newest under runs/",
    metavar="DIR",
    type=FOLDER,
)
@flag(
    "--tolerance",
    MEASUREMENT,
    "How far a measured time may lie outside p10–p90.",
    shown="0.25",
    type=click.FloatRange(0, 10),
    metavar="SHARE",
)
@JSON
def check(
    number: int, sheet: Path, run_folder: Path | None, tolerance: float | None, as_json: bool
) -> None:
    """List the values of a filled-in SHEET (Markdown) that contradict a run, and why.

    Counts, splits, names, and sizes must be equal. Times may lie anywhere in p10–p90, widened by
    the tolerance. Exit codes: 0 no contradiction, 1 contradictions, 2 usage error.
    """
    from paralab.course.check import check_sheet
    from paralab.course.practical import newest
    from paralab.course.sheet import document_of, find
    from paralab.show.sheet_check import print_checked

    find(number)
    folder = run_folder or newest(number)
    _require_number(number, folder)
    try:
        text = sheet.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"Cannot read {sheet}: {error}.",
            fix="a Markdown file, such as `paralab practical N --blank FILE` writes",
        ) from error

    result = replace(
        check_sheet(text, document_of(folder), 0.25 if tolerance is None else tolerance),
        practical=number,
        sheet=str(sheet),
        run_folder=str(folder),
    )
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    else:
        print_checked(result)
    sys.exit(1 if result.contradictions else 0)
