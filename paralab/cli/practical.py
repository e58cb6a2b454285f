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
from paralab.cli.options import (
    COUNT,
    DIR,
    FILE,
    JSON,
    OUT,
    flag,
    omit_none,
    printer,
    request_options,
)
from paralab.errors import UsageError, naming
from paralab.launch.run_options import OUTPUT
from paralab.plan.option import flag_of
from paralab.plan.request import Request
from paralab.record.folder import write_new
from paralab.show.visible import echo

if TYPE_CHECKING:
    from paralab.analyse.blocks import Document

TITLES = {  # listed here, because --help does not import the analysis; a test compares the names
    "5": "data parallelism with nn.DataParallel",
    "6": "DistributedDataParallel and collectives",
    "7": "DDP optimization and debugging",
    "10": "hybrid parallelism",
    "handbook": "data parallelism, chapter 7",
}
COURSE = "Course"
ASK = "ask in the terminal"  # the value of `--predict` without a sheet
FORMATS = ("text", "json", "csv", "junit", "gradescope", "classroom50")

PART = "Run only part N, with only the configurations it needs."
ROUNDS = "Measure each configuration this many times, once per round."
EARLIER = "Use the measurements from an earlier run instead of measuring."
PREDICT = "Ask for a prediction before each part, or read the predictions from SHEET."
VARIANT = "Derive the seed and batch size from a student ID, so that each sheet differs."
MARKDOWN = "Write the filled-in sheet to FILE; `-` prints it."
BLANK = "Write an empty sheet to FILE without measuring; `-` prints it."


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
    steps = {"help": "Optimizer steps per configuration and round.", "shown": "8 to 20"}
    workload = {"shown": "gpt" if name == "7" else "mlp"}
    asks: dict[str, Any] = {"metavar": "[SHEET]", "is_flag": False, "flag_value": ASK}

    @practical.command(name=name, help=f"{heading}: {title}.")
    @request_options("workload", "batch_size", "steps", "device", workload=workload, steps=steps)
    @flag("--part", MEASUREMENT, PART, type=int, metavar="N")
    @flag("--rounds", MEASUREMENT, ROUNDS, "5 or 7", **COUNT)
    @flag("--run run_folder", MEASUREMENT, EARLIER, **DIR)
    @flag("--predict", COURSE, PREDICT, **asks)
    @flag("--variant", COURSE, VARIANT, metavar="STUDENT_ID")
    @flag("--markdown", OUTPUT, MARKDOWN, **FILE)
    @flag("--blank", OUTPUT, BLANK, **FILE)
    @OUT
    @JSON
    def command(as_json: bool, **options: Any) -> None:
        _run(name, as_json, options)


for _name, _title in TITLES.items():
    _add(_name, _title)


def _run(name: str, as_json: bool, options: dict[str, Any]) -> None:
    """Write a blank sheet, or fill one in and show it."""
    from paralab.course import practical as practicals
    from paralab.course.predict import ask, from_sheet
    from paralab.show.document import print_document

    _refuse_contradictions(options, as_json)
    empty = practicals.blank(name, options["part"])
    if options["blank"]:
        _write_sheet(options["blank"], empty)
        return

    predict, markdown = options["predict"], options["markdown"]
    asking, quiet = predict == ASK, as_json or str(markdown) == "-"
    predictions = {}
    if predict:  # check this before measuring
        predictions = ask(empty.sections[0]) if asking else from_sheet(Path(predict), empty)
    document, folder = _open_or_run(name, quiet, options)
    if predict:
        document = _compare(document, folder, predictions, asking)
    _write_files(document, folder, replace_old=bool(predict))
    if markdown:
        _write_sheet(markdown, document)
    if as_json:
        click.echo(json.dumps(replace(document, run_folder=str(folder)).to_dict()))
    elif not quiet:
        if not asking:
            print_document(document)
        echo(f"\nPage: {folder / 'report.html'}   Sheet: {folder / 'sheet.md'}")
        if (folder / "checkpoint.md").exists():
            echo(f"Verification checkpoint: {folder / 'checkpoint.md'}")
        echo(f"Scripts: {practicals.scripts()}")
    if not any(section.blocks for section in document.sections):
        sys.exit(1)  # no part has all the configurations it needs


def _refuse_contradictions(options: dict[str, Any], as_json: bool) -> None:
    """Before measuring, reject contradictory options and existing output files."""
    markdown, blank = options["markdown"], options["blank"]
    if as_json and str(markdown) == "-":
        raise UsageError("--json and `-` both print on stdout.", fix="a file name instead of `-`")
    if options["predict"] == ASK and (as_json or markdown or not sys.stdin.isatty()):
        fix = "--predict SHEET, or a terminal without --json and --markdown"
        raise UsageError("--predict asks questions in the terminal.", fix)
    for path in (markdown, blank):
        if path and str(path) != "-" and path.exists():
            raise UsageError(f"{path} already exists.", fix="another name")
    measuring = ("part", "batch_size", "rounds", "steps", "out", "variant")
    unused = [flag_of(name) for name in measuring if options[name] is not None]
    if options["run_folder"] and unused:
        problem = f"--run uses an earlier run, so {unused[0]} has no effect."
        raise UsageError(problem, fix=f"leave out --run or {unused[0]}")


def _open_or_run(name: str, quiet: bool, options: dict[str, Any]) -> tuple[Document, Path]:
    from paralab.course import practical as practicals
    from paralab.course.configurations import find

    if options["run_folder"]:
        practicals.require_run(options["run_folder"], name)
        return practicals.document_of(options["run_folder"]), options["run_folder"]
    asked = {key: options[key] for key in ("workload", "batch_size", "device")}
    asked["workload"] = asked["workload"] or find(name).workload
    measuring = {key: options[key] for key in ("part", "variant", "rounds", "steps", "out")}
    base = Request("single", **omit_none(asked))
    return practicals.run(name, base=base, say=printer(quiet), **measuring)


def _compare(
    document: Document, folder: Path, predictions: dict[str, str], asking: bool
) -> Document:
    """Put predictions and measurements side by side. With `asking`, show the first part, then ask
    for a prediction before each later part."""
    from paralab.course.predict import add_predictions, ask, write_predictions
    from paralab.show.document import print_document

    for number, section in enumerate(document.sections if asking else ()):
        predictions |= ask(section) if number else {}
        shown = replace(document, title="", subtitle="", findings=(), sections=(section,))
        print_document(add_predictions(shown, predictions))
    write_predictions(folder, predictions)
    return add_predictions(document, predictions)


def _write_files(document: Document, folder: Path, replace_old: bool) -> None:
    """Write the page, the sheet, and the handbook's checkpoint to the run folder."""
    from paralab.course.practical import checkpoint
    from paralab.show.markdown import as_markdown
    from paralab.show.page import render

    files = {"report.html": render(document), "sheet.md": as_markdown(document)}
    if own_file := checkpoint(document):
        files["checkpoint.md"] = as_markdown(own_file)
    for file, text in files.items():
        if replace_old or not (folder / file).exists():
            with naming(folder / file):
                (folder / file).write_text(text, encoding="utf-8")


def _write_sheet(path: Path, document: Document) -> None:
    from paralab.show.markdown import as_markdown

    if str(path) == "-":
        echo(as_markdown(document), nl=False)
    else:
        write_new(path, as_markdown(document))


RUN = "The run that the sheet is based on."
TOLERANCE = "How far a time may lie outside the measured p10–p90 range."
SHARE: dict[str, Any] = {"type": click.FloatRange(0, 10), "metavar": "SHARE"}


@practical.command(short_help="Grade a filled-in sheet, or a class.")
@click.argument("name", metavar="PRACTICAL")
@click.argument("sheet", metavar="SHEET|FOLDER", type=click.Path(path_type=Path))
@flag("--run run_folder", MEASUREMENT, RUN, "the newest under runs/", **DIR)
@flag("--tolerance", MEASUREMENT, TOLERANCE, "0.25", **SHARE)
@flag("--variant", COURSE, "Require a run with this --variant.", metavar="STUDENT_ID")
@flag("--format kind", OUTPUT, "How to print the grades.", "text", type=click.Choice(FORMATS))
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
    must match. Times may be anywhere in the run's p10–p90 range, widened by the tolerance. The
    check judges an answer by its yes or no, its numbers, and its key terms, and lists the rest for
    a human to read.

    Exit codes: 0 everything is right, 1 something is wrong or missing, 2 usage error.
    """
    from paralab.course import class_report
    from paralab.course.practical import newest, require_run
    from paralab.course.sheet_text import read_sheet
    from paralab.show.sheet_check import print_class, print_grade

    allowed = 0.25 if tolerance is None else tolerance
    if sheet.is_dir() and (variant or run_folder):
        problem = f"{sheet} is a folder, but --run and --variant are for one sheet."
        raise UsageError(problem, fix="leave them out")
    if sheet.is_dir():
        submissions = class_report.grade_class(sheet, name, allowed)
    else:
        read_sheet(sheet)  # before the run, because a wrong file name is the likelier mistake
        folder = run_folder or newest(name)
        require_run(folder, name, variant)
        submissions = [class_report.grade_one(sheet, folder, allowed)]

    kind = "json" if as_json else kind or "text"
    if kind != "text":
        click.echo(class_report.FORMATS[kind](submissions))
    elif sheet.is_dir():
        print_class(submissions)
    else:
        print_grade(submissions[0].grade)
    sys.exit(0 if all(submission.passed for submission in submissions) else 1)
