"""Checkpoints on disk. Each save creates a folder, which is complete once it has a manifest.
paralab checks a checkpoint before it loads it.

    DIR/step-00000050/          the state after 50 steps
      __0_0.distcp, …           files from torch.distributed.checkpoint
      .metadata                 where each tensor is in those files
      manifest.json             written last: size and SHA-256 of each file, step, samples, topology

A folder without a manifest is half-written. A checkpoint whose files do not match its manifest is
damaged. paralab loads neither kind, and ignores both when it decides which old checkpoints to
delete.

A checkpoint may come from someone else, so matching checksums do not make it safe. Reading a
checkpoint never runs code from it: see `paralab.record.metadata` for `.metadata`, and
`paralab.worker.checkpoints.checkpoint` for the tensors.
"""

import hashlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paralab.errors import UsageError
from paralab.record.metadata import METADATA, UnsafeMetadata, read_metadata
from paralab.units import size

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
DEFAULT_KEEP = 3
READERS = 4  # threads that compute checksums in parallel, because hashlib releases the GIL
# The plan fields that determine which rank has which tensors and random numbers.
TOPOLOGY = ("strategy", "replicas", "stages", "shards", "schedule", "cuts", "world_size")


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint folder for one step. `problem` says why it cannot be used, or is None if it
    has passed all checks so far."""

    path: Path
    step: int
    manifest: dict[str, Any]
    problem: str | None
    half_written: bool = False  # True if the manifest is missing

    @property
    def num_bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.manifest.get("files", {}).values())


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a run saves checkpoints, and which one it starts from."""

    directory: str
    every: int | None = None  # save every N steps, or only at the end if None
    keep: int = DEFAULT_KEEP  # how many checkpoints to keep
    resume: str | None = None  # the checked checkpoint to start from, if any
    done: int = 0  # the number of steps in that checkpoint
    samples: int = 0  # the number of samples in those steps
    same_topology: bool = False  # whether the topology matches, so random streams can be restored


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def checkpoints(directory: Path, check: bool = False) -> list[Checkpoint]:
    """List a directory's checkpoints, oldest first. With `check`, also check every checksum."""
    # Do not use glob, which treats a folder without read permission as empty.
    entries = directory.iterdir() if directory.is_dir() else ()
    folders = sorted(
        path
        for path in entries
        if path.name.startswith("step-") and path.name[5:].isdecimal() and path.is_dir()
    )
    return [_inspect(path, check) for path in folders]


def last_good(directory: Path) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """Return the newest intact checkpoint and the unusable ones after it. Check every byte."""
    bad: list[Checkpoint] = []
    for checkpoint in reversed(checkpoints(directory)):
        checked = checkpoint if checkpoint.problem else _inspect(checkpoint.path, check=True)
        if not checked.problem:
            return checked, bad
        bad.append(checked)
    return None, bad


def write_manifest(folder: Path, **about: Any) -> None:
    """Complete a checkpoint: write the manifest under a temporary name, then rename it."""

    def describe(path: Path) -> tuple[str, dict[str, Any]]:
        return path.name, {"bytes": path.stat().st_size, "sha256": _digest(path)}

    with ThreadPoolExecutor(READERS) as readers:
        files = dict(readers.map(describe, sorted(folder.iterdir())))
    manifest = {
        "schema": SCHEMA_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **about,
        "files": files,
    }
    part = folder / f"{MANIFEST}.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump(manifest | {"sha256": _manifest_digest(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.rename(folder / MANIFEST)
    for each in (folder, folder.parent):  # make the rename survive a power failure
        handle = os.open(each, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def rotate(directory: Path, keep: int) -> list[Path]:
    """Delete everything older than the newest `keep` intact checkpoints."""
    existing = checkpoints(directory)
    intact = [checkpoint for checkpoint in existing if not checkpoint.problem]
    if len(intact) <= keep:
        return []
    oldest = intact[-keep].step
    old = [checkpoint.path for checkpoint in existing if checkpoint.step < oldest]
    for path in old:
        # Delete the manifest first, so that a kill halfway does not leave a damaged checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return old


def require_room(directory: Path, needed_bytes: int) -> None:
    """Check the free space before a save, so that it does not fail halfway."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes * 1.05:
        needs = f"a checkpoint takes {size(needed_bytes)}, but only {size(free)} is free"
        fix = "a disk with more space, or --keep-checkpoints 1"
        raise UsageError(f"--checkpoint {directory}: {needs}.", fix)


def require_same_training(manifest: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Refuse to continue a different run. The results would look plausible but be meaningless."""
    for name, value in wanted.items():
        if name in manifest and manifest[name] != value:
            saved = f"--{name.replace('_', '-')} {manifest[name]}"
            problem = f"--resume: {path} was saved with {saved}, but this run has {value}."
            raise UsageError(problem, fix=f"{saved}, or another --checkpoint DIR")


def _inspect(path: Path, check: bool) -> Checkpoint:
    step = int(path.name[5:])
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Checkpoint(path, step, {}, "it is half-written (no manifest)", half_written=True)
    except (OSError, ValueError, RecursionError) as error:
        return Checkpoint(path, step, {}, f"its manifest cannot be read: {error}")
    if wrong := _find_malformed(manifest, step):
        return Checkpoint(path, step, {}, wrong)
    return Checkpoint(path, step, manifest, _problem(path, manifest, check))


def _find_malformed(manifest: Any, step: int) -> str | None:
    """Return a problem with the fields, or None. A manifest file can contain anything."""
    if not isinstance(manifest, dict):
        return "its manifest is not a JSON object"
    kinds = {"sha256": str, "files": dict, "step": int, "samples_seen": int, "topology": dict}
    for name, kind in kinds.items():
        if type(manifest.get(name)) is not kind:
            return f"its manifest has no valid {name!r}"
    if manifest["step"] != step:
        return f"its manifest is for step {manifest['step']}"
    if METADATA not in manifest["files"]:
        return f"its manifest does not list {METADATA}"
    for name, entry in manifest["files"].items():
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            return f"its manifest lists {name!r}, which is not a file name"
        entry = entry if isinstance(entry, dict) else {}
        if type(entry.get("bytes")) is not int or type(entry.get("sha256")) is not str:
            return f"its manifest does not contain the size and checksum of {name}"
    return None


def _problem(path: Path, manifest: dict[str, Any], check: bool) -> str | None:
    if manifest["sha256"] != _manifest_digest(manifest):
        return "its manifest is damaged: the checksum does not match"
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (actual := file.stat().st_size) != expected["bytes"]:
            return f"{name} has {actual} bytes instead of {expected['bytes']}"
    if not check:
        return None
    for name, expected in manifest["files"].items():
        try:
            digest = _digest(path / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if digest != expected["sha256"]:
            return f"{name} is damaged: the checksum does not match"
    sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    try:
        read_metadata(path).check(sizes)
    except (OSError, UnsafeMetadata) as error:
        return f"{METADATA} is not safe to load: {error}"
    return None


def _manifest_digest(manifest: dict[str, Any]) -> str:
    others = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
