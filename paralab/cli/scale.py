"""`paralab scale`: train the same model on increasing numbers of devices."""

from pathlib import Path
from typing import Any

import click

from paralab.cli.command import Command
from paralab.cli.compare import MEASUREMENT, NO_PROOF, ROUNDS, STEPS, report
from paralab.cli.options import JSON, OUT, flag, omit_none, printer, request_options
from paralab.plan.request import REPLICATED, Request

COUNTS = "1,2,4"


@click.command(cls=Command, short_help="Measure throughput on increasing numbers of devices.")
@click.argument("strategy", metavar="|".join(REPLICATED))
@request_options(
    replicas={
        "kind": str,
        "metavar": "N,N,…",
        "help": "Numbers of replicas to compare.",
        "shown": COUNTS,
        "strategies": (),
    },
    steps=STEPS,
)
@flag("--weak", MEASUREMENT, "Fix the batch size per device: n devices train on n times the batch.")
@ROUNDS
@NO_PROOF
@OUT
@JSON
def scale(
    strategy: str,
    weak: bool,
    as_json: bool,
    out: Path | None,
    rounds: int | None,
    no_proof: bool,
    **options: Any,
) -> None:
    """Train on increasing numbers of devices and explain where throughput is lost.

    \b
    paralab scale ddp --replicas 1,2,4
    """
    from paralab.experiment.compare import compare
    from paralab.experiment.configurations import scale_configurations

    counts = options.pop("replicas") or COUNTS
    cases = scale_configurations(Request(strategy=strategy, **omit_none(options)), counts, weak)
    how: dict[str, Any] = {"rounds": rounds, "verify": not no_proof, "out": out}
    report(compare(cases, kind="scale", say=printer(quiet=as_json), **how), as_json)
