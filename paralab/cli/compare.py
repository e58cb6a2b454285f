"""`paralab compare`: measure configurations side by side."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from paralab.cli.command import Command
from paralab.cli.options import COUNT, JSON, OUT, emit, flag, omit_none, printer, request_options
from paralab.errors import UsageError
from paralab.plan.option import options_of
from paralab.plan.request import Request
from paralab.show.visible import echo

if TYPE_CHECKING:
    from paralab.analyse.compare import Comparison
    from paralab.analyse.tune import TuneResult

MEASUREMENT = "Measurement"
STEPS = {"help": "Optimizer steps per configuration and round.", "shown": "10 on CPU, 30 on GPU"}
ROUNDS = flag(
    "--rounds",
    MEASUREMENT,
    "Measure each configuration this many times, once per round.",
    shown="5, or as few as 3 if they take over a minute",
    **COUNT,
)
NO_PROOF = flag(
    "--no-proof", MEASUREMENT, "Skip the check that all configurations train the same way."
)


ALL = flag(
    "--all every",
    MEASUREMENT,
    "Measure every strategy, with every way to divide its work that this machine and model support.",
)


@click.command(cls=Command, short_help="Measure configurations side by side.")
@click.argument("configurations", nargs=-1, metavar='[STRATEGY | "STRATEGY --OPTION …"]...')
@request_options(steps=STEPS)
@ALL
@ROUNDS
@NO_PROOF
@OUT
@JSON
def compare(
    configurations: tuple[str, ...],
    as_json: bool,
    every: bool,
    out: Path | None,
    rounds: int | None,
    no_proof: bool,
    **options: Any,
) -> None:
    """Measure configurations side by side and verify that all of them train the same way.

    The default configurations are single, dp, ddp, accumulation, low precision, pipeline, and
    hybrid. Options outside the quotes apply to all configurations.

    \b
    paralab compare --workload gpt
    paralab compare --all --workload gpt
    paralab compare single "ddp --replicas 2" "ddp --replicas 2 --accumulate 4"
    """
    from paralab.experiment import compare as comparison
    from paralab.experiment.configurations import (
        Configuration,
        all_configurations,
        default_configurations,
    )

    base = Request(strategy="single", **omit_none(options))
    if every and configurations:
        problem = f"--all already includes configurations such as {configurations[0]!r}."
        raise UsageError(problem, fix="leave out --all or the configurations")
    asked = [Configuration(_parse_configuration(text, base)) for text in configurations]
    asked = asked or (all_configurations if every else default_configurations)(base)
    say = printer(quiet=as_json)
    result = comparison.compare(asked, rounds=rounds, verify=not no_proof, out=out, say=say)
    report(result, as_json)


def report(result: Comparison | TuneResult, as_json: bool) -> None:
    """Write the page and print the result. Exit with code 1 if every configuration failed."""
    from paralab.analyse.compare import Comparison
    from paralab.show.document import print_summary
    from paralab.show.open_folder import document_of
    from paralab.show.page import write_report

    folder = Path(result.run_folder)
    document = document_of(folder)
    page = write_report(folder, document)

    def show(result: Comparison | TuneResult) -> None:
        print_summary(document)
        echo(f"Finished in {result.seconds:.0f} s. All tables and charts: {page}")

    emit(replace(result, findings=document.findings, report=str(page)), as_json, show)
    if isinstance(result, Comparison) and not result.rows:
        sys.exit(1)


def _parse_configuration(text: str, common: Request) -> Request:
    """Parse `ddp --replicas 2`, and add the common options that apply to it."""
    from paralab.experiment.configurations import with_common

    try:
        strategy, *words = shlex.split(text)
    except ValueError:
        problem = f"{text!r} is not a valid configuration."
        raise UsageError(problem, fix='a strategy with its options: "ddp --replicas 2"') from None

    names = {option.name for option in options_of(Request)}
    parameters = [each for each in compare.params if each.name in names]
    parser = click.Command(text, params=parameters, add_help_option=False)
    try:
        own = omit_none(parser.make_context(text, words).params)
    except click.UsageError as error:
        problem = f"{text!r} is not a valid configuration: {error.format_message()}"
        raise UsageError(problem, fix="the options that `paralab run --help` lists") from error
    return with_common(common, {"strategy": strategy, **own})
