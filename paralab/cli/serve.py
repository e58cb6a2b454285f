"""`paralab serve`: watch the runs in a folder in a browser."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paralab.cli.command import Command
from paralab.cli.options import JSON, flag
from paralab.errors import UsageError
from paralab.launch.run_options import OUTPUT
from paralab.machine.signals import exit_code_of, interrupted
from paralab.show.visible import echo

if TYPE_CHECKING:
    from paralab.serve.served import Served

DEFAULT = Path("runs")  # the folder to which `paralab run` writes
PORT = click.IntRange(0, 65535)


@click.command(cls=Command, short_help="Watch the runs in a folder in a browser.")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@flag("--port", OUTPUT, "The port on 127.0.0.1.", "any free port", type=PORT, metavar="N")
@JSON
def serve(folder: Path | None, port: int | None, as_json: bool) -> None:
    """Watch the runs in FOLDER (by default runs/) in a browser.

    The pages list all runs and experiments, follow a run while it trains, compare runs, and show
    the grades of a class. Open the printed address: it contains a secret token. The server answers
    only this machine, never writes, and does not read anything outside FOLDER.

    Exit codes: 2 usage error, 128 + N stopped by signal N (130 Ctrl-C).
    """
    if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
        problem = "paralab serve needs starlette and uvicorn, which are not installed."
        raise UsageError(problem, fix='pip install "paralab[web]"')
    if folder is not None and not folder.is_dir():
        fix = "the folder that contains your run folders"
        raise UsageError(f"{folder} is not a folder.", fix)
    from paralab.serve.server import serve as start

    def announce(served: Served) -> None:
        if as_json:
            click.echo(json.dumps(served.to_dict()))
            return
        echo(f"Serving {served.folder}\n{served.url}\nPress Ctrl-C to stop.")

    number = start((folder or DEFAULT).resolve(), port or 0, announce)
    if as_json:  # stdout already has its single JSON object
        sys.exit(exit_code_of(number))
    raise interrupted(number, "; the pages are closed.")
