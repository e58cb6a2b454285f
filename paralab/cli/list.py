"""`paralab list`: the strategies and the built-in workloads."""

import click

from paralab.cli.command import Command
from paralab.cli.options import JSON, emit


@click.command(name="list", cls=Command)
@JSON
def list_(as_json: bool) -> None:
    """List the strategies and the built-in workloads."""
    from paralab.show.facts import catalog, print_catalog

    emit(catalog(), as_json, print_catalog)
