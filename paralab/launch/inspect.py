"""Inspect the machine and the workload in a child process that imports torch. This process never
imports it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paralab.errors import ParalabError, UsageError
from paralab.launch.launched_by import without_launch
from paralab.launch.processes import INSIDE, start
from paralab.machine.host import FULL_BYTES, Gpu, Machine
from paralab.workload.summary import Inspection, Layer, Summary, Unit

DEADLINE_SECONDS = 600
KILLED_SECONDS = 60  # for a killed process to disappear


def inspect_machine() -> Machine:
    return _machine(_ask(None)["machine"])


def inspect_workload(inspection: Inspection) -> tuple[Machine, Summary]:
    """Return facts about the machine and the workload as plain numbers. Raise a UsageError for a
    mistake in the user's file."""
    answer = _ask(inspection)
    return _machine(answer["machine"]), _summary(answer["summary"])


def _ask(inspection: Inspection | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        path, log = Path(folder, "answer.json"), Path(folder, "log.txt")
        with log.open("wb") as file:
            environment = {**without_launch(os.environ), INSIDE: "inspection"}
            child = start(
                "paralab.worker.inspect_workload",
                [str(path), json.dumps(inspection and asdict(inspection))],
                environment,
                file,
                prefix=[],
            )
            try:
                child.wait(DEADLINE_SECONDS)
            except subprocess.TimeoutExpired as error:
                what = (
                    f"Loading the workload {inspection.workload}" if inspection else "Loading torch"
                )
                raise UsageError(
                    f"{what} took more than {DEADLINE_SECONDS} s.",
                    fix="a smaller model or less data",
                ) from error
            finally:
                child.kill()
                child.wait(KILLED_SECONDS)
                assert child.stdin is not None
                child.stdin.close()
        if not path.exists():
            if shutil.disk_usage(folder).free < FULL_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
            last = log.read_text(errors="replace").strip().splitlines()
            if any("No module named 'torch'" in line for line in last):
                raise ParalabError(
                    "PyTorch is not installed for this Python.", fix="pip install torch"
                )
            raise ParalabError(
                f"The process that inspects the workload ended with code {child.returncode}.",
                detail="\n".join(last[-15:]),
            )
        answer: dict[str, Any] = json.loads(path.read_text())
    if "error" in answer:
        raise UsageError(**answer["error"])
    return answer


def _machine(data: dict[str, Any]) -> Machine:
    gpus = tuple(
        Gpu(gpu["name"], gpu["memory_bytes"], (gpu["capability"][0], gpu["capability"][1]))
        for gpu in data["gpus"]
    )
    return Machine(**{**data, "gpus": gpus, "backends": tuple(data["backends"])})


def _summary(data: dict[str, Any]) -> Summary:
    layers = tuple(
        Layer(**{**layer, "modules": tuple(layer["modules"])}) for layer in data["layers"]
    )
    units = tuple(Unit(**unit) for unit in data["units"])
    names = {
        name: tuple(data[name]) for name in ("unused", "sparse", "state", "sometimes", "scalars")
    }
    return Summary(**{**data, **names, "layers": layers, "units": units})
