"""`paralab plan`: print how a configuration would use this machine."""

import json
from typing import Any

import click

from paralab.cli.command import Command
from paralab.cli.options import DEVICE_MEMORY, JSON, STRATEGY, omit_none, request_options
from paralab.plan.request import Request


@click.command(cls=Command, short_help="Print the plan for a run without starting it.")
@STRATEGY
@request_options()
@DEVICE_MEMORY
@JSON
def plan(strategy: str, as_json: bool, device_memory: int | None, **options: Any) -> None:
    """Print a run's plan, its memory use, and the reason for each choice, without training."""
    from paralab.experiment.memory import with_fit
    from paralab.experiment.planning import make_plan
    from paralab.show.memory import print_memory
    from paralab.show.run import (
        print_grid,
        print_ranks,
        print_reasons,
        print_sentence,
        print_splits,
        print_stages,
    )

    request = Request(strategy=strategy, **omit_none(options))
    resolved, inspected = make_plan(request, large=True)
    resolved = with_fit(request, inspected, resolved, device_memory)
    if as_json:
        click.echo(json.dumps(resolved.to_json()))
        return
    print_sentence(resolved, inspected.summary.name)
    print_ranks(resolved)
    print_grid(resolved)
    print_stages(resolved)
    print_memory(resolved)
    print_reasons(resolved)
    print_splits(resolved)
