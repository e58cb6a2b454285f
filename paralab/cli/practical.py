"""`paralab practical`: one command per practical, and `check` for teachers."""

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

TITLES = {  # repeated here so that --help does not import the analysis; a test compares the two
    "5": "data parallelism with nn.DataParallel",
    "6": "DistributedDataParallel and collectives",
    "7": "DDP optimization and debugging",
    "10": "hybrid parallelism",
    "handbook": "data parallelism, chapter 7",
}
COURSE = "Course"
ASK = "ask in the terminal"  # the value of --predict without a sheet
FORMATS = ("text", "json", "csv", "junit", "gradescope", "classroom50")
FOLDER = click.Path(file_okay=False, path_type=Path)
SHEET = click.Path(dir_okay=False, path_type=Path, allow_dash=True)


@click.group(cls=Group, short_help="Run a course practical and fill in its sheet.")
def practical() -> None:
    """Run a course practical, and use the measurements to fill in its tables and answer its
    questions.

    \b
    paralab practical 5                     run practical 5
    paralab practical 7 --part 3            run one part
    paralab practical 5 --predict           predict each part, then see its results
    paralab practical 5 --predict sheet.md  read the predictions from a sheet
    paralab practical 5 --blank sheet.md    write an empty sheet to fill in
    paralab practical check 5 sheet.md      grade a filled-in sheet
    """


def _add(name: str, title: str) -> None:
    heading = "Handbook" if name == "handbook" else f"Practical {name}"

    @practical.command(name=name, help=f"{heading}: {title}.")
    @request_options(
        "workload",
        "batch_size",
        "steps",
        "device",
        workload={"shown": "gpt" if name == "7" else "mlp"},
        steps={"help": "Optimizer steps per configuration and round.", "shown": "8 to 20"},
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
        "Measure each configuration this many times, once per round.",
        shown="5 or 7",
        type=click.IntRange(1),
        metavar="N",
    )
    @flag(
        "--run run_folder",
        MEASUREMENT,
        "Use the measurements from an earlier run instead of measuring.",
        metavar="DIR",
        type=FOLDER,
    )
    @flag(
        "--predict",
        COURSE,
        "Ask for predictions before showing each part, or read them from SHEET.",
        metavar="[SHEET]",
        is_flag=False,
        flag_value=ASK,
    )
    @flag(
        "--variant",
        COURSE,
        "Derive the seed and batch size from a student ID, so that each sheet differs.",
        metavar="STUDENT_ID",
    )
    @flag(
        "--markdown",
        OUTPUT,
        "Write the filled-in sheet to FILE; `-` prints it.",
        metavar="FILE",
        type=SHEET,
    )
    @flag(
        "--blank",
        OUTPUT,
        "Write an empty sheet to FILE without measuring; `-` prints it.",
        metavar="FILE",
        type=SHEET,
    )
    @OUT
    @JSON
    def command(
        as_json: bool,
        markdown: Path | None,
        blank: Path | None,
        run_folder: Path | None,
        **options: Any,
    ) -> None:
        _run(name, as_json, markdown, blank, run_folder, options)


for _name, _title in TITLES.items():
    _add(_name, _title)


def _run(
    name: str,
    as_json: bool,
    markdown: Path | None,
    blank: Path | None,
    run_folder: Path | None,
    options: dict[str, Any],
) -> None:
    """Write a blank sheet, or fill one in and show it."""
    _check(options, markdown, blank, run_folder, as_json)
    if blank:
        from paralab.course import practical as practicals

        _write_sheet(blank, practicals.blank(name, options["part"]))
        return

    quiet = as_json or str(markdown) == "-"
    document, folder = _open_or_run(name, run_folder, quiet, options)
    document = _predict(document, folder, options["predict"])
    _write_files(document, folder, replace_old=bool(options["predict"]))
    if markdown:
        _write_sheet(markdown, document)
    if as_json:
        printed = replace(document, run_folder=str(folder))
        click.echo(json.dumps(printed.to_dict()))
    elif not quiet:
        from paralab.course.practical import scripts
        from paralab.show.document import print_document

        if options["predict"] != ASK:
            print_document(document)
        echo(f"\nPage: {folder / 'report.html'}   Sheet: {folder / 'sheet.md'}")
        if (folder / "checkpoint.md").exists():
            echo(f"Verification checkpoint: {folder / 'checkpoint.md'}")
        echo(f"Scripts: {scripts()}")
    if not any(section.blocks for section in document.sections):
        sys.exit(1)  # no part has the configurations it needs


def _check(
    options: dict[str, Any],
    markdown: Path | None,
    blank: Path | None,
    run_folder: Path | None,
    as_json: bool,
) -> None:
    """Before measuring, reject options that contradict each other and output files that already
    exist."""
    if as_json and str(markdown) == "-":
        raise UsageError("--json and `-` both print on stdout.", fix="a file name instead of `-`")
    if options["predict"] == ASK and (as_json or markdown or not sys.stdin.isatty()):
        raise UsageError(
            "--predict asks questions in the terminal.",
            fix="--predict SHEET, or leave out --json and --markdown and run it in a terminal",
        )
    for path in (markdown, blank):
        if path and str(path) != "-" and path.exists():
            raise UsageError(
                f"{path} already exists, and paralab does not overwrite files.", fix="another name"
            )
    measuring = ("part", "batch_size", "rounds", "steps", "out", "variant")
    unused = [flag_of(name) for name in measuring if options[name] is not None]
    if run_folder and unused:
        raise UsageError(
            f"--run uses an earlier run, so {unused[0]} has no effect.",
            fix=f"leave out --run or {unused[0]}",
        )


def _open_or_run(
    name: str, run_folder: Path | None, quiet: bool, options: dict[str, Any]
) -> tuple[Document, Path]:
    """Run the practical, or read an earlier run."""
    from paralab.course import practical as practicals
    from paralab.course.configurations import find
    from paralab.course.predict import from_sheet

    if options["predict"] not in (None, ASK):  # report a mistake in the sheet before measuring
        from_sheet(Path(options["predict"]), practicals.blank(name, options["part"]))
    if run_folder:
        _require_run_of(name, run_folder)
        return practicals.document_of(run_folder), run_folder
    asked = {key: options[key] for key in ("workload", "batch_size", "device")}
    asked["workload"] = asked["workload"] or find(name).workload
    return practicals.run(
        name,
        options["part"],
        base=Request("single", **given(asked)),
        variant=options["variant"],
        say=printer(quiet),
        rounds=options["rounds"],
        steps=options["steps"],
        out=options["out"],
    )


def _predict(document: Document, folder: Path, source: str | None) -> Document:
    """Ask for predictions part by part and show each part, or read the predictions from a sheet."""
    from paralab.course.predict import add_predictions, ask, from_sheet, write_predictions
    from paralab.show.document import print_document

    if source is None:
        return document
    predictions = {} if source == ASK else from_sheet(Path(source), document)
    for section in document.sections if source == ASK else ():
        predictions |= ask(section)
        shown = replace(document, title="", subtitle="", findings=(), sections=(section,))
        print_document(add_predictions(shown, predictions))
    write_predictions(folder, predictions)
    return add_predictions(document, predictions)


def _write_files(document: Document, folder: Path, replace_old: bool) -> None:
    """Write the page, the sheet, and the handbook's checkpoint to the run folder."""
    from paralab.course.practical import checkpoint
    from paralab.show.markdown import as_markdown
    from paralab.show.page import render

    handed_in = checkpoint(document)
    files = {"report.html": render(document), "sheet.md": as_markdown(document)}
    if handed_in:
        files["checkpoint.md"] = as_markdown(handed_in)
    for file, text in files.items():
        if replace_old or not (folder / file).exists():
            with naming(folder / file):
                (folder / file).write_text(text, encoding="utf-8")


def _require_run_of(name: str, folder: Path) -> None:
    from paralab.course.practical import name_of

    found = name_of(folder)
    if found != name:
        contents = f"a practical {found} run" if found else "not a practical run"
        raise UsageError(
            f"Expected a run of practical {name}, but {folder} is {contents}.",
            fix=f"paralab practical {found or name} …",
        )


def _write_sheet(path: Path, document: Document) -> None:
    from paralab.show.markdown import as_markdown

    if str(path) == "-":
        echo(as_markdown(document), nl=False)
    else:
        write_new(path, as_markdown(document))


@practical.command(short_help="Grade a filled-in sheet, or a class.")
@click.argument("name", metavar="PRACTICAL")
@click.argument("sheet", metavar="SHEET|FOLDER", type=click.Path(path_type=Path))
@flag(
    "--run run_folder",
    MEASUREMENT,
    "The run that the sheet is based on.",
    metavar="DIR",
    type=FOLDER,
    shown="the newest under runs/",
)
@flag(
    "--tolerance",
    MEASUREMENT,
    "How far outside p10–p90 a measured time may be.",
    type=click.FloatRange(0, 10),
    metavar="SHARE",
    shown="0.25",
)
@flag(
    "--variant",
    COURSE,
    "Require a run with this --variant.",
    metavar="STUDENT_ID",
)
@flag(
    "--format kind",
    OUTPUT,
    "How to print the grades.",
    type=click.Choice(FORMATS),
    shown="text",
)
@JSON
def check(
    name: str,
    sheet: Path,
    run_folder: Path | None,
    tolerance: float | None,
    variant: str | None,
    kind: str | None,
    as_json: bool,
) -> None:
    """Grade a filled-in SHEET (Markdown), or a FOLDER with a sheet and a run for each student.

    Each cell and answer is right, wrong, missing, or not judged. Counts, splits, names, and sizes
    must match. Times may be anywhere in the run's p10–p90 range, widened by the tolerance. Answers
    are judged by yes or no, numbers, and key terms; the rest is listed for a human to read.

    Exit codes: 0 everything is right, 1 something is wrong or missing, 2 usage error.
    """
    from paralab.course import class_report
    from paralab.course.configurations import find
    from paralab.course.practical import newest, require_variant
    from paralab.show.sheet_check import print_class, print_grade

    find(name)
    allowed = 0.25 if tolerance is None else tolerance
    if sheet.is_dir() and (variant or run_folder):
        raise UsageError(
            f"{sheet} is a folder: --run and --variant are for one sheet.", fix="leave them out"
        )
    if sheet.is_dir():
        submissions = class_report.grade_class(sheet, name, allowed)
    else:
        folder = run_folder or newest(name)
        _require_run_of(name, folder)
        require_variant(folder, variant)
        submissions = [class_report.grade_one(sheet, folder, allowed)]

    kind = "json" if as_json else kind or "text"
    if kind != "text":
        click.echo(class_report.FORMATS[kind](submissions))
    elif sheet.is_dir():
        print_class(submissions)
    else:
        print_grade(submissions[0].grade)
    sys.exit(0 if all(submission.passed for submission in submissions) else 1)
