"""`paralab plan`: print how a configuration would use this machine."""

import json
from typing import Any

import click

from paralab.cli.command import Command
from paralab.cli.options import JSON, STRATEGY, flag, given, request_options
from paralab.errors import UsageError
from paralab.plan.request import DEVICES, Request
from paralab.units import parse_size


@click.command(cls=Command, short_help="Print the plan for a run without starting it.")
@STRATEGY
@request_options()
@flag(
    "--device-memory device_memory",
    DEVICES,
    "Say whether the plan fits a device with this much memory, and find the largest batch that "
    "fits.",
    "the GPU's memory",
    metavar="SIZE, such as 16GB",
)
@JSON
def plan(strategy: str, as_json: bool, device_memory: str | None, **options: Any) -> None:
    """Print the plan for a run, its memory, and the reason for each choice, without training."""
    from paralab.experiment.memory import with_fit
    from paralab.experiment.planning import make_plan
    from paralab.show.memory import print_memory
    from paralab.show.run import (
        print_grid,
        print_ranks,
        print_reasons,
        print_sentence,
        print_stages,
        print_tensor_plan,
    )

    given_bytes = _bytes(device_memory) if device_memory else None
    request = Request(strategy=strategy, **given(options))
    resolved, inspected = make_plan(request, large=True)
    resolved = with_fit(request, inspected, resolved, given_bytes)
    if as_json:
        click.echo(json.dumps(resolved.to_json()))
        return
    print_sentence(resolved, inspected.summary.name)
    print_ranks(resolved)
    print_grid(resolved)
    print_stages(resolved)
    print_memory(resolved)
    print_reasons(resolved)
    print_tensor_plan(resolved)


def _bytes(text: str) -> int:
    if (value := parse_size(text)) is None:
        problem = f"--device-memory {text} is not a size."
        raise UsageError(problem, fix="--device-memory 16GB, or 16GiB")
    return value
