"""The command line: one sub-command per verb, which parses, calls and prints. Nothing here imports
torch."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click

from paralab import __version__
from paralab.cli.checkpoint import checkpoint
from paralab.cli.doctor import doctor
from paralab.cli.options import OUT, request_options, say_to_user, written
from paralab.cli.practical import practical
from paralab.cli.run import run
from paralab.cli.streams import make_safe as make_streams_safe
from paralab.errors import ParalabError, UsageError, of_the_system
from paralab.launch.processes import loading_once
from paralab.machine.signals import ENDS, exit_code_of, hear, name_of, number_of, raise_stop
from paralab.plan.request import STRATEGIES, Request
from paralab.show.visible import echo

SAID_SECONDS = 2.0  # for rank 0 to say what is wrong: torchrun ends all ranks when one has ended


def _leave_it_to_rank_0() -> None:
    """A launched rank other than 0 finds the same mistake as rank 0: it ends silently, once that
    one has said so."""
    from paralab.launch.launched_by import joined

    with suppress(
        UsageError
    ):  # it is the environment that is wrong: then nobody knows who is rank 0
        launched = joined()
        if launched and launched.rank:
            with suppress(KeyboardInterrupt):
                time.sleep(SAID_SECONDS)
            sys.exit(UsageError.exit_code)


def _json_is_asked_for() -> bool:
    """Of us: what stands after -- is another program's."""
    own = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    return "--json" in own


def _tell_json(error: str, detail: str | None = None, fix: str | None = None) -> None:
    if _json_is_asked_for():
        with suppress(OSError):  # it may be the standard output that cannot be written
            click.echo(json.dumps({"error": error, "detail": detail, "fix": fix}))


@contextmanager
def _flushing() -> Iterator[None]:
    """What cannot be written is an error of the command, also if it only shows at the end."""
    try:
        yield
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _end_with(error: ParalabError) -> NoReturn:
    _tell_json(error.problem, error.detail, error.fix)
    echo(f"paralab: {error}", err=True)
    sys.exit(error.exit_code)


class Commands(click.Group):
    """Prints our own errors as they are: what, why, what to write instead; no traceback."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        make_streams_safe()
        return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        hear(dict.fromkeys(ENDS, raise_stop))
        if (
            "SLURM_JOB_ID" in os.environ
        ):  # before the time limit a job may get this signal; without checkpoints it does nothing
            signal.signal(signal.SIGUSR1, lambda number, frame: None)
        try:
            with loading_once(), _flushing():
                return super().invoke(ctx)
        except click.UsageError as error:
            _leave_it_to_rank_0()
            _tell_json(error.format_message(), fix="--help")
            raise
        except ParalabError as error:
            if isinstance(error, UsageError):
                _leave_it_to_rank_0()
            _end_with(error)
        except OSError as error:
            if error.errno == errno.EPIPE:  # `| head` has seen enough: click ends silently
                raise
            _end_with(of_the_system(error))
        except KeyboardInterrupt as stop:
            number = number_of(stop)
            _tell_json(f"stopped by {name_of(number)}")
            echo(f"paralab: stopped by {name_of(number)}; nothing was left running.", err=True)
            sys.exit(exit_code_of(number))


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="paralab")
def main() -> None:
    """A laboratory for parallel training in PyTorch.

    Give it a model: it trains it single-device, with DataParallel, DDP, accumulation, mixed
    precision, model parallelism, pipelines and hybrids, shows what every rank and device did, and
    proves that it is the same training.

    \b
    paralab compare --workload gpt               eight set-ups side by side, and a page about them
    paralab compare --workload my.py:workload    the same with your own model
    paralab run ddp --replicas 2 --live          train on two ranks, and watch
    paralab verify all                           prove every strategy equal to one device
    paralab practical 5                          a practical of the course, filled in
    paralab doctor train.py                      what is wrong with a script that knows nothing of paralab
    """


@main.command(short_help="The resolved plan with its reasons; starts nothing.")
@click.argument("strategy", metavar="|".join(STRATEGIES))
@request_options
def plan(strategy: str, as_json: bool, **options: Any) -> None:
    """Print the resolved plan with a reason per choice; start nothing."""
    from paralab.experiment import run as training
    from paralab.show.run import print_ranks, print_reasons, print_sentence, print_stages

    resolved, _, summary = training.make_plan(Request(strategy=strategy, **written(options)))
    if as_json:
        click.echo(json.dumps(resolved.to_json()))
        return
    print_sentence(resolved, summary.name)
    print_ranks(resolved)
    print_stages(resolved)
    print_reasons(resolved)


@main.command(short_help="Prove that a strategy trains like one device.")
@click.argument("strategy", metavar="|".join([*STRATEGIES, "all"]))
@request_options
@OUT
@click.option(
    "--step-deadline",
    metavar="SECONDS",
    type=float,
    help="Stop a case whose step takes longer. [default: 120]",
)
def verify(
    strategy: str, as_json: bool, out: Path | None, step_deadline: float | None, **options: Any
) -> None:
    """Prove that a STRATEGY trains like one device: losses, gradients, every parameter and every
    buffer.

    Options that are given hold for every case; the others are varied: accumulation 1 and 4, even
    and uneven splits, a whole and a partial last batch. Four steps each, or --steps. In fp64 unless
    --precision says otherwise.

    What may differ for a good reason (BatchNorm, random numbers, low precision, a forward that
    counts its calls) is held still for the proof, and the difference it makes is shown beside it.
    Exit code 0 only if every case was proved equal.
    """
    from paralab.experiment import verify as proof
    from paralab.show.verify import print_proof

    given = {name: value for name, value in written(options).items() if name != "workload"}
    say = (lambda line: None) if as_json else lambda line: echo(line, err=True)
    given |= {} if step_deadline is None else {"step_deadline": step_deadline}
    result = proof.verify(
        strategy, [options["workload"]] if options["workload"] else [], out=out, say=say, **given
    )
    if as_json:
        click.echo(json.dumps(result))
    else:
        print_proof(result)
    sys.exit(0 if result["passed"] else 1)


EXPERIMENT_OPTIONS: list[Callable[[Any], Any]] = [
    OUT,
    click.option(
        "--rounds",
        type=click.IntRange(1),
        help="Every set-up is measured once per round. [default: 5, fewer if slow]",
    ),
    click.option(
        "--no-proof", is_flag=True, help="Do not prove that the set-ups are the same training."
    ),
]


def experiment_options(command: Any) -> Any:
    for option in reversed(EXPERIMENT_OPTIONS):
        command = option(command)
    return request_options(command)


@main.command(short_help="Measure strategies side by side, each proved equal.")
@click.argument("setups", nargs=-1, metavar='[STRATEGY | "STRATEGY --OPTION …"]...')
@experiment_options
def compare(
    setups: tuple[str, ...],
    as_json: bool,
    out: Path | None,
    rounds: int | None,
    no_proof: bool,
    **options: Any,
) -> None:
    """Measure strategies side by side, each proved to be the same training.

    Without arguments: single, dp, ddp, accumulation, low precision, pipeline and hybrid. Options
    outside the quotes hold for all.

    \b
    paralab compare --workload gpt
    paralab compare single "ddp --replicas 2" "ddp --replicas 2 --accumulate 4"
    """
    from paralab.experiment import compare as comparison
    from paralab.experiment.rounds import Case

    base = Request(strategy="single", **written(options))
    cases = [Case(_parsed(text, options)) for text in setups] or comparison.default_cases(base)
    result = comparison.compare(
        cases, rounds=rounds, prove=not no_proof, out=out, say=say_to_user(as_json)
    )
    _tell(result, as_json)


@main.command(short_help="More devices: throughput, and where the rest went.")
@click.argument("strategy", metavar="dp|ddp|fsdp|hybrid")
@click.option(
    "--weak", is_flag=True, help="Keep the batch per device: n devices train on n times the batch."
)
@experiment_options
def scale(
    strategy: str,
    weak: bool,
    as_json: bool,
    out: Path | None,
    rounds: int | None,
    no_proof: bool,
    **options: Any,
) -> None:
    """Train on more and more devices: throughput per device, and where the missing part went.

    \b
    paralab scale ddp --replicas 1,2,4
    """
    from paralab.experiment import compare as comparison

    counts = options.pop("replicas") or "1,2,4"
    cases = comparison.scale_cases(Request(strategy=strategy, **written(options)), counts, weak)
    result = comparison.compare(
        cases, kind="scale", rounds=rounds, prove=not no_proof, out=out, say=say_to_user(as_json)
    )
    _tell(result, as_json)


for _option in scale.params:
    if _option.name == "replicas":
        _option.type, _option.metavar = click.STRING, "1,2,4"
        _option.help = "The numbers of replicas to compare. [default: 1,2,4]"


@main.command(short_help="Search the fastest bucket size and DDP options.")
@click.argument("strategy", metavar="ddp|pipeline|hybrid")
@request_options
@OUT
@click.option("--trials", type=click.IntRange(4), help="At most about so many short trainings.")
@click.option(
    "--seconds",
    "budget_seconds",
    type=float,
    help="Begin no new rung after half of so many seconds.",
)
def tune(
    strategy: str,
    as_json: bool,
    out: Path | None,
    trials: int | None,
    budget_seconds: float | None,
    **options: Any,
) -> None:
    """Search the bucket size, accumulation, micro-batches and options with the fastest step.
    Options that are given are kept."""
    from paralab.experiment import tune as tuning

    request = Request(strategy=strategy, **written(options))
    result = tuning.tune(
        request, trials=trials, budget_seconds=budget_seconds, out=out, say=say_to_user(as_json)
    )
    _tell(result, as_json)


@main.command(short_help="Tables and pages of run folders, without torch.")
@click.argument(
    "folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN..."
)
@click.option("--report", type=click.Path(path_type=Path), help="Write the page to this file.")
@click.option(
    "--markdown", type=click.Path(path_type=Path), help="Write the tables and answers to this file."
)
@click.option("--all", "everything", is_flag=True, help="Print every table, not only the first.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object on stdout, and nothing else there.",
)
def show(
    folders: tuple[Path, ...],
    report: Path | None,
    markdown: Path | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Tables and pages of RUN folders, computed anew from what was recorded; needs no torch.

    Several runs that were made one by one are shown side by side.
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
            fix="a folder as paralab left it",
        ) from error
    for path, text in ((report, render), (markdown, as_markdown)):
        if path:
            write_new(path, text(document))
            echo(f"{path} written", err=True)
    if as_json:
        click.echo(json.dumps(document.to_json()))
    else:
        (print_document if everything else print_summary)(document)


@main.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def list_(as_json: bool) -> None:
    """Strategies and built-in workloads, one line each."""
    from paralab.show.facts import catalog, print_catalog

    click.echo(json.dumps(catalog())) if as_json else print_catalog()


@main.command(short_help="This machine: what works, and what does not, and why.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def env(as_json: bool) -> None:
    """This machine: what was probed, what cannot be used and why."""
    from paralab.experiment.environment import environment
    from paralab.show.facts import print_environment

    found = environment()
    click.echo(json.dumps(found)) if as_json else print_environment(found)


main.add_command(run)
main.add_command(practical)
main.add_command(checkpoint)
main.add_command(doctor)


def _parsed(text: str, options: dict[str, Any]) -> Request:
    """A set-up as on the command line of `run`; what stands outside the quotes holds where it means
    something."""
    from paralab.experiment.compare import with_common

    try:
        strategy, *words = shlex.split(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is no set-up.", fix='a strategy with its options: "ddp --replicas 2"'
        ) from None
    setup = click.Command(
        text, params=[p for p in compare.params if p.name in options], add_help_option=False
    )
    try:
        context = setup.make_context(text, words)
    except click.UsageError as error:
        raise UsageError(
            f"The set-up {text!r}: {error.format_message()}",
            fix="paralab run --help lists the options",
        ) from error
    said = click.core.ParameterSource.COMMANDLINE
    own = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is said
    }
    return with_common(
        Request(strategy="single", **written(options)), {"strategy": strategy, **own}
    )


def _tell(result: dict[str, Any], as_json: bool) -> None:
    """The page into the folder; the result as JSON, or its first table and the verdict."""
    from paralab.show.document import print_summary
    from paralab.show.open_folder import document_of
    from paralab.show.page import write_report

    folder = Path(result["run_folder"])
    document = document_of(folder)
    page = write_report(folder, document)
    if as_json:
        click.echo(
            json.dumps(
                {
                    **result,
                    "findings": [asdict(finding) for finding in document.findings],
                    "report": str(page),
                }
            )
        )
    else:
        print_summary(document)
        echo(f"{result['seconds']:.0f} s; all tables and pictures: {page}")
    if all(row["error"] for row in result.get("rows", [{"error": None}])):
        sys.exit(1)
