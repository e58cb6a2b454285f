"""`paralab plan`: print how a configuration would use this machine."""

import json
from typing import Any

import click

from paralab.cli.command import Command
from paralab.cli.options import JSON, STRATEGY, given, request_options
from paralab.plan.request import Request


@click.command(cls=Command, short_help="Print the plan for a run without starting it.")
@STRATEGY
@request_options()
@JSON
def plan(strategy: str, as_json: bool, **options: Any) -> None:
    """Print the plan for a run and the reason for each choice, without training."""
    from paralab.experiment.planning import make_plan
    from paralab.show.run import print_ranks, print_reasons, print_sentence, print_stages

    resolved, inspected = make_plan(Request(strategy=strategy, **given(options)))
    if as_json:
        click.echo(json.dumps(resolved.to_json()))
        return
    print_sentence(resolved, inspected.summary.name)
    print_ranks(resolved)
    print_stages(resolved)
    print_reasons(resolved)
