"""`paralab tune`: search for the options with the fastest step."""

from pathlib import Path
from typing import Any

import click

from paralab.cli.command import Command
from paralab.cli.compare import STEPS, report
from paralab.cli.options import JSON, OUT, flag, given, printer, request_options
from paralab.plan.request import Request

SEARCH = "Search"
TRIALS: dict[str, Any] = {"type": click.IntRange(4), "metavar": "N"}
BUDGET = "Do not start another search round once half of this time has passed."


@click.command(cls=Command, short_help="Search for the options with the fastest step.")
@click.argument("strategy", metavar="ddp|pipeline|hybrid")
@request_options(steps=STEPS)
@flag("--trials", SEARCH, "Limit the search to about N short runs.", **TRIALS)
@flag("--seconds budget_seconds", SEARCH, BUDGET, type=float, metavar="SECONDS")
@OUT
@JSON
def tune(
    strategy: str,
    as_json: bool,
    out: Path | None,
    trials: int | None,
    budget_seconds: float | None,
    **options: Any,
) -> None:
    """Search for the bucket size, accumulation steps, micro-batches, and DDP options with the
    fastest step.

    The options you give stay fixed.
    """
    from paralab.experiment.tune import tune as search

    request = Request(strategy=strategy, **given(options))
    say = printer(quiet=as_json)
    result = search(request, trials=trials, budget_seconds=budget_seconds, out=out, say=say)
    report(result, as_json)
