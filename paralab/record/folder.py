"""The run folder: the only thing that the training half and the reading half share. Nothing in it
is overwritten.

manifest.json       what was asked, planned and found: versions, machine, command, plan, data, constraints
events/rankN.jsonl  one line per event
logs/rankN.txt      what rank N printed
failures.jsonl      one line per attempt that failed, when the run was started again
testimonies/        where every rank was when one of them hung
result.json         the numbers of the finished run (absent if it was killed: they can be computed from the events)
trace.json          the same events for ui.perfetto.dev and chrome://tracing
weights.pt          the final weights, on request
profile/rankN.json  torch.profiler's trace of steps 4 to 7, on request
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from paralab.errors import ParalabError, UsageError

SCHEMA_VERSION = 2
PACKAGES = ("paralab", "torch", "numpy", "rich", "click", "transformers")


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "manifest.json"
        self.events = path / "events"
        self.logs = path / "logs"
        self.outcome_path = path / "outcome.json"
        self.result_path = path / "result.json"
        self.trace_path = path / "trace.json"
        self.weights_path = path / "weights.pt"
        self.profile_path = path / "profile"
        self.failures_path = path / "failures.jsonl"

    def testimonies(self, attempt: int) -> Path:
        """What the ranks said when one of them hung."""
        return self.path / "testimonies" / str(attempt)

    @classmethod
    def create(cls, out: Path | None, label: str) -> RunFolder:
        """A new folder: `out` itself, or `runs/DATE_TIME_label` with a number if that is taken."""
        if out is not None:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise UsageError(
                    f"--out {out}: it exists and is not empty; paralab overwrites nothing.",
                    fix="a new folder",
                )
            path = out
        else:
            stem = time.strftime("%Y-%m-%d_%H-%M-%S_") + label
            path = Path("runs", stem)
            number = 2
            while path.exists():
                path = Path("runs", f"{stem}_{number}")
                number += 1
        folder = cls(path)
        try:
            folder.events.mkdir(parents=True)
        except OSError as error:
            raise UsageError(
                f"The run folder {path} cannot be made: {error.strerror}.", fix="--out DIR"
            ) from error
        return folder

    def write_manifest(self, **parts: Any) -> None:
        """Before anything is started, so that even a run that dies at once can be reproduced."""
        manifest = {
            "schema": SCHEMA_VERSION,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "folder": os.getcwd(),
            "packages": {name: version(name) for name in PACKAGES},
            **parts,
        }
        _write_new(self.manifest_path, manifest)

    def write_outcome(self, outcome: dict[str, Any]) -> None:
        """Of an experiment: what came of the cases that its manifest plans."""
        _write_new(self.outcome_path, outcome)

    def write_result(self, result: dict[str, Any]) -> None:
        _write_new(self.result_path, result)

    def note_failure(self, attempt: int, problem: str, noticed: float) -> None:
        """One line per attempt that failed, and when that was noticed (Unix time)."""
        line = {"attempt": attempt, "problem": problem, "unix_seconds": round(noticed, 3)}
        with (
            suppress(OSError),
            self.failures_path.open("a", encoding="utf-8") as file,
        ):  # a full disk may be the failure
            file.write(json.dumps(line) + "\n")

    def write_trace(self, trace: dict[str, Any]) -> None:
        """Compact: it is for programs to read, and has a line's worth for every event."""
        # Perfetto does not decode \u escapes: it would show `rank 0 \u00b7 cpu:0`.
        _write_new(self.trace_path, trace, indent=None, ensure_ascii=False)


def version(package: str) -> str | None:
    """The installed version, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_new(path: Path, text: str) -> None:
    """A file that the user named; what is there already is theirs."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(
            f"{path} exists already; paralab overwrites nothing.", fix="another name"
        ) from error
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.", fix="a file in a folder that exists"
        ) from error


def _write_new(
    path: Path, value: dict[str, Any], indent: int | None = 1, ensure_ascii: bool = True
) -> None:
    """Whole or not at all: written beside, then renamed."""
    assert not path.exists(), path
    beside = path.with_suffix(".part")
    try:
        text = json.dumps(
            value,
            indent=indent,
            separators=None if indent else (",", ":"),
            ensure_ascii=ensure_ascii,
        )
        beside.write_text(
            text, encoding="utf-8", errors="replace"
        )  # a lone surrogate is no text, and must not cost the file
        beside.rename(path)
    except OSError as error:
        raise ParalabError(
            f"{path} cannot be written: {error.strerror}.", fix="--out DIR on a disk with room"
        ) from error
