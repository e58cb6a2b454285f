"""`paralab run`: train with ranks started here, with ranks that were launched, or as a Slurm job."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from paralab.cli.command import Command
from paralab.cli.options import (
    JSON,
    STRATEGY,
    flag,
    given,
    options_from,
    printer,
    request_options,
    take,
)
from paralab.errors import UsageError
from paralab.launch.run_options import OUTPUT, RunOptions
from paralab.plan.request import Request
from paralab.show.visible import echo

LAUNCHING, SLURM = "Launching", "Slurm"


@click.command(cls=Command, short_help="Train a workload and report what it cost.")
@STRATEGY
@request_options()
@options_from(RunOptions)
@flag(
    "--report",
    is_flag=True,
    heading=OUTPUT,
    help="Write report.html into the run folder: tables, timeline, load, memory.",
)
@flag(
    "--show",
    type=click.Choice(["splits", "ranks"]),
    multiple=True,
    heading=OUTPUT,
    help="Print one line per replica or per rank, as the practicals do.",
)
@flag(
    "--live",
    is_flag=True,
    heading=OUTPUT,
    help="Watch every rank and device during training: load, memory, times, communication.",
)
@JSON
@flag(
    "--launcher",
    type=click.Choice(["paralab", "torchrun"]),
    heading=LAUNCHING,
    default="paralab",
    help="What starts the ranks on this machine: paralab, or torchrun's elastic agent.",
)
@flag(
    "--slurm",
    metavar="KEY=VALUE,…",
    heading=SLURM,
    help="Submit a Slurm job with these sbatch options: partition=gpu,gres=gpu:4,time=10:00.",
)
@flag("--nodes", type=int, heading=SLURM, default="1", help="Nodes of the Slurm job.")
@flag(
    "--dry-run",
    is_flag=True,
    heading=SLURM,
    help="Print the script of the Slurm job; submit nothing.",
)
@flag(
    "--slurm-wait",
    metavar="SECONDS",
    type=float,
    heading=SLURM,
    help="Cancel the Slurm job if it has not started by then.",
)
def run(
    strategy: str,
    as_json: bool,
    show: tuple[str, ...],
    live: bool,
    report: bool,
    launcher: str | None,
    slurm: str | None,
    nodes: int | None,
    dry_run: bool,
    slurm_wait: float | None,
    **options: Any,
) -> None:
    """Train a workload with a STRATEGY and report what it cost.

    Under torchrun, or srun with several tasks, the launched processes become the ranks, and rank 0
    reports. With --slurm, paralab submits a job, follows it, and fetches its result.

    \b
    torchrun --nproc_per_node=2 -m paralab run ddp
    srun -n 4 paralab run ddp
    paralab run ddp --nodes 2 --slurm partition=gpu,gres=gpu:4,time=10:00

    Exit codes: 0 success, 1 failure, 2 usage error, 75 stopped and saved (use --resume), 128 + N
    stopped by signal N (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP).
    """
    from paralab.launch import slurm_job as submitting
    from paralab.launch.launched_by import joined
    from paralab.launch.restart import RestartPolicy
    from paralab.launch.torchrun import become_torchrun
    from paralab.show.page import write_report
    from paralab.show.run import print_result
    from paralab.show.screen import Screen

    chosen = RunOptions(**take(RunOptions, options))
    survival = RestartPolicy.from_options(chosen)
    tensorboard = chosen.tensorboard
    request = Request(strategy=strategy, **given(options))
    how: dict[str, Any] = {
        "out": chosen.out,
        "save_weights": chosen.save_weights,
        "profile": chosen.profile,
        "tensorboard": tensorboard,
        "survival": survival,
    }
    launched = joined() if slurm is None else None
    if launcher == "torchrun":
        if slurm is not None:
            raise UsageError(
                "--launcher torchrun starts ranks on this machine; in a Slurm job srun does that.",
                fix="leave out one of the two",
            )
        if not launched:
            become_torchrun(request, survival.max_restarts)
        how["survival"] = replace(survival, max_restarts=0)  # the agent starts them again
    if slurm is not None and dry_run:
        script = submitting.dry_run(request, nodes, slurm, **how)
        click.echo(json.dumps({"script": script}) if as_json else script, nl=as_json)
        return
    if slurm is None:
        submitting.require_slurm(nodes, dry_run, slurm_wait)
    how |= {"say": printer(quiet=as_json and slurm is not None)}
    train = _trainer(launched, slurm, nodes=nodes, wait_seconds=slurm_wait)
    if as_json:
        if live:
            raise UsageError(
                "--live draws in the terminal, but --json prints one object and nothing else.",
                fix="only one of the two",
            )
        result = train(request, **how)
        click.echo(
            json.dumps(
                result
                | ({"report": str(write_report(Path(result["run_folder"])))} if report else {})
            )
        )
        return
    screen = (
        Screen(show, live, looking=slurm is None) if not launched or launched.rank == 0 else None
    )
    try:
        result = train(request, **how, **({"watch": screen.watch} if screen else {}))
    finally:
        if screen:
            screen.close()
    print_result(result, show)
    if report:
        echo(f"All tables and charts: {write_report(Path(result['run_folder']))}")
    if tensorboard:
        echo(f"View it with: tensorboard --logdir {tensorboard}")


def _trainer(launched: Any, slurm: str | None, **job: Any) -> Callable[..., dict[str, Any]]:
    """What trains: ranks started here, ranks that were launched already, or a Slurm job."""
    from paralab.experiment import run as training
    from paralab.launch import slurm_job as submitting

    if slurm is not None:
        return partial(submitting.run, options=slurm, **job)
    if launched:
        from paralab.launch import joined_ranks as joining  # imports torch, for the rendezvous

        return partial(joining.run, launched)
    return training.run
