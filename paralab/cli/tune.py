"""`paralab tune`: search for the configuration with the most samples per second."""

from pathlib import Path
from typing import Any

import click

from paralab.cli.command import Command
from paralab.cli.compare import STEPS, report
from paralab.cli.options import (
    COUNT,
    DEVICE_MEMORY,
    JSON,
    OUT,
    flag,
    omit_none,
    printer,
    request_options,
)
from paralab.plan.request import ALL, STRATEGIES, Request

SEARCH = "Search"
TRIALS: dict[str, Any] = {"type": click.IntRange(4), "metavar": "N"}
BUDGET = "Do not start another search round once half of this time has passed."


DEVICES = "Search every way to use this many devices."
ANY_BATCH = "Also search over batch sizes. A different batch size changes training."


@click.command(cls=Command, short_help="Search for the fastest configuration.")
@click.argument("strategy", default=ALL, metavar="|".join([f"[{ALL}", *STRATEGIES]) + "]")
@request_options(steps=STEPS)
@flag("--devices", SEARCH, DEVICES, "with all: every GPU, or every core", **COUNT)
@DEVICE_MEMORY
@flag("--any-batch", SEARCH, ANY_BATCH)
@flag("--trials", SEARCH, "Limit the search to about N short runs.", **TRIALS)
@flag("--seconds budget_seconds", SEARCH, BUDGET, type=float, metavar="SECONDS")
@OUT
@JSON
def tune(
    strategy: str,
    as_json: bool,
    out: Path | None,
    devices: int | None,
    device_memory: int | None,
    any_batch: bool,
    trials: int | None,
    budget_seconds: float | None,
    **options: Any,
) -> None:
    """Search for the configuration that trains the most samples per second.

    With all (the default), search every way to use the devices: strategies, replicas, stages,
    shards, ZeRO stages, and schedules. With one strategy, search its options: bucket size,
    accumulation steps, micro-batches, recomputation, compile, and more. Configurations that do not
    fit in memory are not measured.

    The options that you set stay fixed. The result lists low precision separately.

    \b
    paralab tune --devices 4 --workload gpt
    paralab tune ddp --workload gpt
    paralab tune single --any-batch --workload gpt
    """
    from paralab.experiment.tune import tune as search

    request = Request(strategy=strategy, **omit_none(options))
    say = printer(quiet=as_json)
    result = search(
        request,
        devices=devices,
        device_bytes=device_memory,
        any_batch=any_batch,
        trials=trials,
        budget_seconds=budget_seconds,
        out=out,
        say=say,
    )
    report(result, as_json)
