"""`paralab checkpoint`: what lies in a folder of checkpoints, and whether it can be trusted. Needs
no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from paralab.errors import UsageError
from paralab.record.checkpoints import Checkpoint, checkpoints
from paralab.show.visible import echo
from paralab.units import plural, size

AS_JSON = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object on stdout, and nothing else there.",
)
FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


@click.group(short_help="What a folder of checkpoints holds, and whether it is whole.")
def checkpoint() -> None:
    """What a folder of checkpoints holds (`run --checkpoint DIR`), and whether every byte of it is
    as it was written."""


@checkpoint.command(name="list")
@FOLDER
@AS_JSON
def list_(folder: Path, as_json: bool) -> None:
    """The checkpoints in DIR: step, size, how they were made. Files are looked for, but not
    read."""
    _tell(folder, as_json, check=False)


@checkpoint.command()
@FOLDER
@AS_JSON
def verify(folder: Path, as_json: bool) -> None:
    """Read every byte of the checkpoints in DIR (or of one of them) and compare the checksums. Exit
    code 1 if one is not whole."""
    sys.exit(1 if _tell(folder, as_json, check=True) else 0)


def _tell(folder: Path, as_json: bool, check: bool) -> bool:
    """Print what was found; true if something is wrong."""
    found = _found(folder, check)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "folder": str(folder),
                    "checked": check,
                    "checkpoints": [_as_json(each) for each in found],
                }
            )
        )
        return any(each.problem for each in found)
    for each in found:
        what = each.problem or ("whole, every byte checked" if check else "complete, not read")
        echo(
            f"{each.path.name}  {size(each.num_bytes) if each.manifest else '':>10}  {_made(each)}  {what}"
        )
    whole = [each for each in found if not each.problem]
    bad = len(found) - len(whole)
    echo(
        f"{plural(len(found), 'checkpoint')}, {bad} of them not whole."
        if bad
        else f"{plural(len(found), 'checkpoint')}."
    )
    if bad:
        last = f"step {whole[-1].step}" if whole else "the beginning"
        echo(f"--resume would go on with {last}.")
    return bool(bad)


def _found(folder: Path, check: bool) -> list[Checkpoint]:
    one = folder.name.startswith("step-") and folder.name[5:].isdecimal()
    found = [
        each
        for each in checkpoints(folder.parent if one else folder, check)
        if not one or each.path.name == folder.name
    ]
    if not found:
        problem = "does not exist" if not folder.exists() else "holds no checkpoint"
        raise UsageError(f"{folder} {problem}.", fix="the DIR of `paralab run … --checkpoint DIR`")
    return found


def _made(each: Checkpoint) -> str:
    if not each.manifest:
        return ""
    topology = each.manifest.get("topology", {})
    made = f"{topology.get('strategy')} on {plural(topology.get('world_size', 0), 'rank')}"
    return (
        f"{each.manifest.get('samples_seen', 0):,} samples  {made}  {each.manifest.get('created')}"
    )


def _as_json(each: Checkpoint) -> dict[str, Any]:
    known = {
        "path": str(each.path),
        "step": each.step,
        "bytes": each.num_bytes,
        "problem": each.problem,
    }
    return known | {
        "manifest": {name: value for name, value in each.manifest.items() if name != "files"}
    }
