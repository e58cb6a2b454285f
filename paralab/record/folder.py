"""The run folder: training writes it, and all analysis reads it. paralab never overwrites files in
it.

manifest.json       versions, machine, command, plan, data, constraints
events/rankN.jsonl  one line per event
logs/rankN.txt      output of rank N
failures.jsonl      one line per failed attempt in a restarted run
stacks/             where each rank was when a rank hung
result.json         the results; for a killed run, paralab recomputes them from the events
trace.json          the same events for ui.perfetto.dev and chrome://tracing
weights.pt          the final weights, on request
profile/rankN.json  torch.profiler's trace of steps 4 to 7, on request
"""

import json
import os
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from paralab.errors import ParalabError, UsageError, refusing

SCHEMA_VERSION = 2
PACKAGES = ("paralab", "torch", "numpy", "rich", "click", "transformers")


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events"
        self.logs = path / "logs"

    def stack_dumps(self, attempt: int) -> Path:
        """Return the folder for stack dumps, which show where each rank was when a rank hung."""
        return self.path / "stacks" / str(attempt)

    @classmethod
    def create(cls, out: Path | None, label: str) -> Self:
        """Create `out`, or `runs/DATE_TIME_label` with a number if that folder exists."""
        if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"--out {out} exists and is not empty.", fix="a new folder")
        stem = time.strftime("%Y-%m-%d_%H-%M-%S_") + label
        path, number = out or Path("runs", stem), 2
        while out is None and path.exists():
            path = Path("runs", f"{stem}_{number}")
            number += 1
        folder = cls(path)
        with refusing(f"The run folder {path} cannot be created", fix="--out DIR"):
            folder.events.mkdir(parents=True)
        return folder

    def write_manifest(self, **parts: Any) -> None:
        """Write the manifest before the ranks start, so a failed run is reproducible too."""
        manifest = {
            "schema": SCHEMA_VERSION,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "folder": os.getcwd(),
            "packages": {name: version(name) for name in PACKAGES},
            **parts,
        }
        self.write("manifest.json", manifest)

    def write(self, name: str, value: dict[str, Any], **style: Any) -> None:
        """Write a JSON file under a temporary name and rename it, so it is never incomplete."""
        path = self.path / name
        assert not path.exists(), path
        part = path.with_suffix(".part")
        try:
            text = json.dumps(value, **style or {"indent": 1})
            # A lone surrogate cannot be encoded, but must not make the write fail.
            part.write_text(text, encoding="utf-8", errors="replace")
            part.rename(path)
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror}."
            raise ParalabError(problem, fix="--out DIR on a disk with free space") from error

    def write_trace(self, trace: dict[str, Any]) -> None:
        """Write the trace as compact JSON, because it is large and only programs read it."""
        # Do not escape: Perfetto does not decode \u and would show `rank 0 \u00b7 cpu:0`.
        self.write("trace.json", trace, separators=(",", ":"), ensure_ascii=False)

    def note_failure(self, attempt: int, problem: str, noticed: float) -> None:
        """Record a failed attempt, and when we noticed the failure (Unix time)."""
        line = {"attempt": attempt, "problem": problem, "unix_seconds": round(noticed, 3)}
        with suppress(OSError):  # a full disk may be the failure
            with (self.path / "failures.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def version(package: str) -> str | None:
    """Return the installed version, or None if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_new(path: Path, text: str) -> None:
    """Write a file that the user named. Never overwrite an existing file."""
    if path.exists():
        raise UsageError(f"{path} already exists.", fix="another name")
    with refusing(f"{path} cannot be written", fix="a file in an existing folder"):
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
