"""`paralab run`: train with ranks that paralab starts, ranks that another launcher started, or a
Slurm job."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace as replace_fields

from paralab.cli.command import Command
from paralab.cli.options import (
    JSON,
    STRATEGY,
    emit,
    flag,
    omit_none,
    options_from,
    printer,
    request_options,
    take,
)
from paralab.errors import UsageError
from paralab.launch.run_options import OUTPUT, RunOptions
from paralab.plan.option import option, to_words
from paralab.plan.request import Request
from paralab.show.visible import echo

if TYPE_CHECKING:
    from paralab.analyse.result import Result
    from paralab.launch.job import Launcher

LAUNCHING, SLURM = "Launching", "Slurm"


@dataclass(frozen=True)
class SlurmOptions:
    slurm: str | None = option(
        "Submit a Slurm job with these sbatch options: partition=gpu,gres=gpu:4,time=10:00.",
        SLURM,
        metavar="KEY=VALUE,…",
    )
    nodes: int | None = option("Nodes in the Slurm job.", SLURM, shown="1")
    dry_run: bool = option(
        "Print the Slurm job script without submitting it.", SLURM, default=False
    )
    slurm_wait: float | None = option(
        "Cancel the Slurm job if it has not started after this time.", SLURM, metavar="SECONDS"
    )


@click.command(cls=Command, short_help="Train a workload and report what it cost.")
@STRATEGY
@request_options()
@options_from(RunOptions)
@flag("--report", OUTPUT, "Write report.html into the run folder: tables, timeline, load, memory.")
@flag(
    "--show",
    OUTPUT,
    "Print one line per replica or per rank, like the scripts in the practicals.",
    type=click.Choice(["splits", "ranks"]),
    multiple=True,
)
@flag("--live", OUTPUT, "Watch the load, memory, and times of each rank during training.")
@JSON
@flag(
    "--launcher",
    LAUNCHING,
    "Start the ranks on this machine with paralab or with torchrun's elastic agent.",
    shown="paralab",
    type=click.Choice(["paralab", "torchrun"]),
)
@options_from(SlurmOptions)
def run(
    strategy: str,
    as_json: bool,
    show: tuple[str, ...],
    live: bool,
    report: bool,
    launcher: str | None,
    **options: Any,
) -> None:
    """Train a workload with a STRATEGY and report what it cost.

    Under torchrun, or srun with multiple tasks, the launched processes become the ranks, and rank 0
    reports. With --slurm, paralab submits a job, follows it, and fetches its result.

    \b
    torchrun --nproc_per_node=2 -m paralab run ddp
    srun -n 4 paralab run ddp
    paralab run ddp --nodes 2 --slurm partition=gpu,gres=gpu:4,time=10:00

    Exit codes: 0 success, 1 failure, 2 usage error, 75 stopped and saved (use --resume), 128 + N
    stopped by signal N (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP).
    """
    from paralab.experiment import run as experiment
    from paralab.launch.joined_ranks import JoinedLauncher
    from paralab.launch.launched_by import detect_launcher
    from paralab.launch.restart import LocalLauncher
    from paralab.launch.slurm_job import SlurmLauncher
    from paralab.show.screen import Screen

    chosen = RunOptions(**take(RunOptions, options))
    asked = SlurmOptions(**take(SlurmOptions, options))
    request = Request(strategy=strategy, **omit_none(options))
    slurm, launched = None, None
    if asked.slurm is None:
        if words := to_words(asked):
            fix = '--slurm partition=NAME,…, or --slurm "" for the default partition'
            raise UsageError(f"{words[0]} is for Slurm jobs and needs --slurm.", fix)
        launched = detect_launcher()
    else:
        slurm = SlurmLauncher(asked.slurm, asked.nodes, asked.slurm_wait)
    if launcher == "torchrun":
        _use_torchrun(request, chosen, slurm is not None, launched is not None)
        chosen = replace(chosen, max_restarts=0)  # torchrun restarts the ranks
    if slurm and asked.dry_run:
        script = slurm.write_script(request, chosen)
        click.echo(json.dumps({"script": script}) if as_json else script, nl=as_json)
        return
    if as_json and live:
        raise UsageError("--live and --json cannot be used together.", fix="only one of them")

    here: Launcher = JoinedLauncher(launched) if launched else LocalLauncher()
    how: dict[str, Any] = {"say": printer(quiet=as_json and slurm is not None)}
    with ExitStack() as stack:
        if not as_json and (not launched or launched.rank == 0):
            screen = stack.enter_context(closing(Screen(show, live, looking=slurm is None)))
            how["watch"] = screen.watch
        result = experiment.run(request, chosen, slurm or here, **how)
    _report(result, chosen, show, report, as_json)


def _report(
    result: Result, chosen: RunOptions, show: tuple[str, ...], report: bool, as_json: bool
) -> None:
    from paralab.show.page import write_report
    from paralab.show.run import print_result

    def print_text(result: Result) -> None:
        print_result(result, show)
        if report:
            echo(f"All tables and charts: {result.report}")
        if chosen.tensorboard:
            echo(f"View it with: tensorboard --logdir {chosen.tensorboard}")

    if report:
        result = replace_fields(result, report=str(write_report(Path(result.run_folder))))
    emit(result, as_json, print_text)


def _use_torchrun(request: Request, chosen: RunOptions, slurm: bool, launched: bool) -> None:
    """Replace this process with torchrun, unless it is already one of torchrun's ranks."""
    from paralab.experiment.planning import make_plan
    from paralab.launch.torchrun import become_torchrun

    if slurm:
        problem = "--launcher torchrun and --slurm cannot be used together."
        raise UsageError(problem, fix="only one of them")
    if not launched:
        become_torchrun(make_plan(request)[0], chosen.max_restarts)
