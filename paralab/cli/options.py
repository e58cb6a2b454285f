"""Options that several commands share, and how they become a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from paralab.plan.request import PRECISIONS
from paralab.plan.schedules import SCHEDULES

REQUEST_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--workload",
        metavar="NAME|FILE.py:FUNCTION",
        default=None,
        help="What is trained. [default: mlp]",
    ),
    click.option(
        "--replicas",
        type=int,
        help="Copies of the model that share the batch (dp, ddp, fsdp, hybrid). [default: 2]",
    ),
    click.option(
        "--stages",
        type=int,
        help="Devices one copy is spread over (mp, pipeline, hybrid). [default: 2]",
    ),
    click.option(
        "--batch-size",
        type=int,
        help="Samples per optimizer step over ALL devices, whatever the strategy.",
    ),
    click.option(
        "--accumulate",
        type=int,
        help="Backward passes per optimizer step; synchronized only at the last.",
    ),
    click.option(
        "--micro-batches",
        type=int,
        help="Pieces in which a batch flows through the stages (pipeline, hybrid).",
    ),
    click.option(
        "--schedule",
        metavar="|".join(SCHEDULES),
        help="A process per stage, in this order (pipeline, hybrid).",
    ),
    click.option(
        "--precision",
        metavar="|".join(PRECISIONS),
        help="fp16 is trained with a GradScaler. [default: fp32]",
    ),
    click.option(
        "--loss-scale", type=float, help="The GradScaler's first scale (fp16). [default: 65536]"
    ),
    click.option(
        "--no-scaler",
        is_flag=True,
        default=None,
        help="Train fp16 without a GradScaler, to see the underflow.",
    ),
    click.option(
        "--bucket-mb",
        type=float,
        help="Size of DDP's gradient buckets (ddp, hybrid). [default: 25, the first one 1]",
    ),
    click.option(
        "--bucket-view",
        is_flag=True,
        default=None,
        help="DDP's gradient_as_bucket_view (ddp, hybrid).",
    ),
    click.option("--static-graph", is_flag=True, default=None, help="DDP's static_graph (ddp)."),
    click.option(
        "--find-unused",
        is_flag=True,
        default=None,
        help="DDP's find_unused_parameters (ddp). [default: if a trial finds any]",
    ),
    click.option(
        "--sync-every-pass",
        is_flag=True,
        default=None,
        help="Synchronize in every pass, to see what it costs (ddp, fsdp).",
    ),
    click.option(
        "--steps",
        type=int,
        help="Optimizer steps. [default: 20, or what --epochs gives; in comparisons 10 a round]",
    ),
    click.option("--epochs", type=int, help="Passes over the data."),
    click.option(
        "--samples",
        type=int,
        help="Use only so many samples of the data: an epoch ends after them.",
    ),
    click.option(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        help="Decides the weights and the order of the samples.",
    ),
    click.option(
        "--device",
        metavar="auto|cpu|cuda",
        default="auto",
        show_default=True,
        help="Where the devices are taken from.",
    ),
    click.option(
        "--placement",
        metavar="spread|same",
        help="same: all stages on one device (mp, pipeline, hybrid).",
    ),
    click.option(
        "--threads-per-device",
        type=int,
        help="Size of a CPU device. [default: cores ÷ devices, at least 1]",
    ),
    click.option(
        "--prefix",
        metavar="COMMAND",
        help="Start every rank through it, e.g. 'numactl -N {local_rank}'.",
    ),
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print one JSON object on stdout, and nothing else there.",
    ),
]
OUT = click.option(
    "--out", type=click.Path(path_type=Path), help="The run folder. [default: runs/DATE_TIME_…]"
)


def request_options(command: Any) -> Any:
    for option in reversed(REQUEST_OPTIONS):
        command = option(command)
    return command


def written(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were written; a Request has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


def say_to_user(as_json: bool) -> Callable[[str], None]:
    from paralab.show.console import (
        errors,
    )  # where the bar is drawn, above which the line must stand

    return (
        (lambda line: None)
        if as_json
        else lambda line: errors.print(line, markup=False, emoji=False, soft_wrap=True)
    )
