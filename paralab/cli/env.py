"""`paralab env`: what this machine can run."""

import click

from paralab.cli.command import Command
from paralab.cli.options import JSON, emit


@click.command(cls=Command, short_help="Show what this machine can run.")
@JSON
def env(as_json: bool) -> None:
    """Show what this machine can run, what it cannot, and why."""
    from paralab.experiment.environment import environment
    from paralab.show.facts import print_environment

    emit(environment(), as_json, print_environment)
