"""`paralab verify`: check that a strategy trains like a single device."""

import sys
from pathlib import Path
from typing import Any

import click

from paralab.cli.command import Command
from paralab.cli.options import JSON, OUT, emit, omit_none, options_from, printer, request_options
from paralab.launch.run_options import RunOptions
from paralab.plan.request import LENGTH, STRATEGIES


@click.command(cls=Command, short_help="Check that a strategy trains like a single device.")
@click.argument("strategy", metavar="|".join([*STRATEGIES, "all"]))
@request_options(
    workload={"shown": "mlp:tiny and gpt:tiny"},
    replicas={"shown": "2 and 3"},
    micro_batches={"shown": "2 and 3"},
    precision={"shown": "fp64"},
    accumulate={"shown": "1 and 4"},
    steps={"help": "Optimizer steps per configuration.", "shown": "4"},
)
@options_from(
    RunOptions,
    "step_deadline",
    step_deadline={
        "help": "Stop a configuration if a step takes longer than this.",
        "shown": "120",
        "heading": LENGTH,
    },
)
@OUT
@JSON
def verify(
    strategy: str, as_json: bool, out: Path | None, step_deadline: float | None, **options: Any
) -> None:
    """Check that a STRATEGY trains like a single device: same losses, gradients, parameters, and
    buffers.

    The options that you set apply to every configuration. The others vary: 1 and 4 accumulation steps,
    even and uneven splits, and a full and a partial last batch.

    Some differences are legitimate: BatchNorm statistics, random numbers, low precision, or a
    forward method that counts its calls. The check removes these causes on both sides and reports
    their effect separately.

    The exit code is 0 only if every configuration is equal.
    """
    from paralab.experiment.verify import verify as check
    from paralab.show.verify import print_verify

    workload = options.pop("workload")
    asked = omit_none({**options, "step_deadline": step_deadline})
    result = check(
        strategy, [workload] if workload else [], out=out, say=printer(quiet=as_json), **asked
    )

    emit(result, as_json, print_verify)
    sys.exit(0 if result.passed else 1)
