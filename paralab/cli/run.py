"""`paralab run`: train under a strategy, by ranks started here, by those that were launched, or as
a Slurm job."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from paralab.cli.options import OUT, request_options, say_to_user, written
from paralab.errors import UsageError
from paralab.plan.request import STRATEGIES, Request
from paralab.show.visible import echo

SURVIVAL_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--checkpoint",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Save here: every N steps, at the end, on a signal.",
    ),
    click.option("--checkpoint-every", metavar="N", type=int, help="Save after every N steps."),
    click.option(
        "--keep-checkpoints",
        metavar="N",
        type=int,
        default=3,
        show_default=True,
        help="Delete older ones than these.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on with the last whole checkpoint; at any number of ranks, any strategy.",
    ),
    click.option(
        "--max-restarts",
        metavar="N",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Start failed ranks again.",
    ),
    click.option(
        "--start-deadline",
        metavar="SECONDS",
        type=float,
        default=600,
        show_default=True,
        help="For coming to step 0.",
    ),
    click.option(
        "--step-deadline",
        metavar="SECONDS",
        type=float,
        default=600,
        show_default=True,
        help="A step takes longer: it hangs.",
    ),
    click.option(
        "--save-deadline",
        metavar="SECONDS",
        type=float,
        default=600,
        show_default=True,
        help="For a save.",
    ),
]


def survival_options(command: Any) -> Any:
    for option in reversed(SURVIVAL_OPTIONS):
        command = option(command)
    return command


def _survival(options: dict[str, Any]) -> Any:
    """Take these options out of the others."""
    from paralab.launch.restart import RestartPolicy
    from paralab.launch.watchdog import Deadlines

    deadlines = Deadlines(*(options.pop(f"{phase}_deadline") for phase in Deadlines._fields))
    return RestartPolicy(
        directory=options.pop("checkpoint"),
        every=options.pop("checkpoint_every"),
        keep=options.pop("keep_checkpoints"),
        resume=options.pop("resume"),
        max_restarts=options.pop("max_restarts"),
        deadlines=deadlines,
    )


@click.command()
@click.argument("strategy", metavar="|".join(STRATEGIES))
@request_options
@OUT
@click.option(
    "--save-weights", is_flag=True, help="Leave the final weights in the run folder (weights.pt)."
)
@click.option(
    "--profile",
    is_flag=True,
    help="Leave torch.profiler's trace of steps 4 to 7 of every rank in the run folder.",
)
@click.option(
    "--report",
    is_flag=True,
    help="Write report.html into the run folder: tables, timeline, load, memory.",
)
@click.option(
    "--show",
    type=click.Choice(["splits", "ranks"]),
    multiple=True,
    help="One line per replica / per rank, as the practicals print them.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Watch every rank and device while it trains: load, memory, times, communication.",
)
@click.option(
    "--tensorboard",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write the run's numbers for TensorBoard, to a sub-folder of DIR.",
)
@survival_options
@click.option(
    "--launcher",
    type=click.Choice(["paralab", "torchrun"]),
    default="paralab",
    show_default=True,
    help="Who starts the ranks on this machine: paralab, or torch's elastic agent.",
)
@click.option(
    "--slurm",
    metavar="KEY=VALUE,…",
    help="As a Slurm job, with these options of sbatch: partition=gpu,gres=gpu:4,time=10:00.",
)
@click.option("--nodes", type=int, help="Nodes of the Slurm job. [default: 1]")
@click.option("--dry-run", is_flag=True, help="Print the Slurm job's script; submit nothing.")
@click.option(
    "--slurm-wait",
    metavar="SECONDS",
    type=float,
    help="Cancel the Slurm job if it has not started by then.",
)
def run(
    strategy: str,
    as_json: bool,
    out: Path | None,
    save_weights: bool,
    profile: bool,
    show: tuple[str, ...],
    live: bool,
    tensorboard: Path | None,
    report: bool,
    launcher: str,
    slurm: str | None,
    nodes: int | None,
    dry_run: bool,
    slurm_wait: float | None,
    **options: Any,
) -> None:
    """Train a workload under a STRATEGY and report what it cost.

    Under torchrun, or srun with several tasks, the launched processes are its ranks: they join, and
    rank 0 reports. With --slurm it is submitted as a job, followed, and its result brought back.

    \b
    torchrun --nproc_per_node=2 -m paralab run ddp
    srun -n 4 paralab run ddp
    paralab run ddp --nodes 2 --slurm partition=gpu,gres=gpu:4,time=10:00

    Exit codes: 0 done, 1 failed, 2 wrong use, 75 stopped and saved (--resume goes on), 128 + the
    signal's number stopped at once (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP).
    """
    from paralab.launch import slurm_job as submitting
    from paralab.launch.launched_by import joined
    from paralab.launch.torchrun import become_torchrun
    from paralab.show.page import write_report
    from paralab.show.run import print_result
    from paralab.show.screen import Screen

    survival = _survival(options)
    request = Request(strategy=strategy, **written(options))
    how: dict[str, Any] = {
        "out": out,
        "save_weights": save_weights,
        "profile": profile,
        "tensorboard": tensorboard,
    }
    how |= {"survival": survival}
    launched = joined() if slurm is None else None
    if launcher == "torchrun":
        if slurm is not None:
            raise UsageError(
                "--launcher torchrun is for this machine; in a Slurm job srun starts the ranks.",
                fix="leave one out",
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
    how |= {"say": say_to_user(as_json and slurm is not None)}
    train = _trainer(launched, slurm, nodes=nodes, wait_seconds=slurm_wait)
    if as_json:
        if live:
            raise UsageError(
                "--live draws in the terminal, and --json prints one object and nothing else.",
                fix="one of the two",
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
        echo(f"All tables and pictures: {write_report(Path(result['run_folder']))}")
    if tensorboard:
        echo(f"Look at it with: tensorboard --logdir {tensorboard}")


def _trainer(launched: Any, slurm: str | None, **job: Any) -> Callable[..., dict[str, Any]]:
    """Who trains: ranks started here, those that were launched already, or a Slurm job."""
    from paralab.experiment import run as training
    from paralab.launch import slurm_job as submitting

    if slurm is not None:
        return partial(submitting.run, options=slurm, **job)
    if launched:
        from paralab.launch import joined_ranks as joining  # imports torch, to meet the other ranks

        return partial(joining.run, launched)
    return training.run
