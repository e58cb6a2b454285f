"""`paralab checkpoint`: list the checkpoints in a folder and check their bytes, without torch."""

import sys
from pathlib import Path

import click

from paralab.cli.command import Group
from paralab.cli.options import JSON, emit
from paralab.errors import UsageError
from paralab.record.checkpoints import Checkpoint, checkpoints
from paralab.record.types import JsonObject, Record
from paralab.show.visible import echo
from paralab.units import plural, size

FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


class SavedCheckpoint(Record, frozen=True, kw_only=True):
    path: str
    step: int
    bytes: int
    problem: str | None  # None if the checkpoint is complete
    manifest: JsonObject  # the manifest, without the list of files


class CheckpointList(Record, frozen=True, kw_only=True):
    folder: str
    checked: bool  # True if the checksums were checked
    checkpoints: list[SavedCheckpoint]


@click.group(cls=Group, short_help="List checkpoints and check that they are complete.")
def checkpoint() -> None:
    """List the checkpoints that `run --checkpoint DIR` saved, and check that they are complete."""


@checkpoint.command(name="list", short_help="List the checkpoints in DIR.")
@FOLDER
@JSON
def list_(folder: Path, as_json: bool) -> None:
    """List the checkpoints in DIR: step, size, and the run that saved them.

    This finds missing files, but does not read the others.
    """
    _report(folder, as_json, check=False)


@checkpoint.command(short_help="Check the checkpoints against their checksums.")
@FOLDER
@JSON
def verify(folder: Path, as_json: bool) -> None:
    """Check all checkpoints in DIR, or the single checkpoint DIR, against their checksums.

    The exit code is 1 if a checkpoint is damaged.
    """
    sys.exit(1 if _report(folder, as_json, check=True) else 0)


def _report(folder: Path, as_json: bool, check: bool) -> bool:
    """Print the checkpoints, and return whether any of them is damaged."""
    listed = _find_checkpoints(folder, check)
    whole = [each for each in listed if not each.problem]
    damaged = len(listed) - len(whole)

    def show(_: CheckpointList) -> None:
        for each in listed:
            state = each.problem or ("complete, checksums match" if check else "complete, not read")
            bytes_ = size(each.num_bytes) if each.manifest else ""
            echo(f"{each.path.name}  {bytes_:>10}  {_describe_origin(each)}  {state}")
        echo(plural(len(listed), "checkpoint") + (f", {damaged} damaged." if damaged else "."))
        if damaged:  # what choose_checkpoint does
            empty = all(each.half_written for each in listed)
            start = "start from the beginning" if empty else "stop: no checkpoint is usable"
            echo(f"--resume would {f'continue from step {whole[-1].step}' if whole else start}.")

    rows = []
    for each in listed:
        manifest = {name: value for name, value in each.manifest.items() if name != "files"}
        given = {"path": str(each.path), "bytes": each.num_bytes, "manifest": manifest}
        rows.append(SavedCheckpoint.like(each, **given))
    emit(CheckpointList(folder=str(folder), checked=check, checkpoints=rows), as_json, show)
    return bool(damaged)


def _find_checkpoints(folder: Path, check: bool) -> list[Checkpoint]:
    """Return all checkpoints in a folder, or the folder itself if it is a checkpoint."""
    listed = checkpoints(folder, check)
    if not listed:  # the folder may itself be a checkpoint
        listed = [each for each in checkpoints(folder.parent, check) if each.path == folder]
    if not listed:
        problem = "contains no checkpoint" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {problem}.", fix="the DIR of `paralab run … --checkpoint DIR`")
    return listed


def _describe_origin(each: Checkpoint) -> str:
    if not each.manifest:
        return ""
    topology = each.manifest.get("topology", {})
    ranks = plural(topology.get("world_size", 0), "rank")
    samples = plural(each.manifest.get("samples_seen", 0), "sample")
    return f"{samples}  {topology.get('strategy')} on {ranks}  {each.manifest.get('created')}"
