"""Inspect the machine and the workload in a child process, because it must import torch."""

import errno
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paralab.errors import ParalabError, UsageError
from paralab.launch.launched_by import without_launch
from paralab.launch.processes import INSIDE, start
from paralab.machine.host import FULL_BYTES, Machine
from paralab.workload.summary import Inspection, Summary

DEADLINE_SECONDS = 600
KILLED_SECONDS = 60  # how long to wait for a killed process to end


def inspect_machine() -> Machine:
    return msgspec.convert(_ask(None)["machine"], Machine)


class Inspected(NamedTuple):
    """The numbers that a plan is based on."""

    machine: Machine
    summary: Summary


def inspect_workload(inspection: Inspection) -> Inspected:
    """Inspect the machine and the workload. Raise a UsageError for a mistake in the user's file."""
    answer = _ask(inspection)
    try:
        summary = msgspec.convert(answer["summary"], Summary, strict=False)
    except msgspec.ValidationError as error:
        problem = f"The workload {inspection.workload} has an invalid value: {error}."
        raise UsageError(problem, fix="a value of the expected type") from error
    return Inspected(msgspec.convert(answer["machine"], Machine), summary)


def _ask(inspection: Inspection | None) -> dict[str, Any]:
    """Start the process that writes the answer, and wait for it."""
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        path, log = Path(folder, "answer.json"), Path(folder, "log.txt")
        arguments = [str(path), json.dumps(inspection and asdict(inspection))]
        environment = {**without_launch(os.environ), INSIDE: "inspection"}
        with log.open("wb") as file:
            child = start("paralab.worker.inspect_workload", arguments, environment, file)
        try:
            code = child.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired as error:
            subject = f"the workload {inspection.workload}" if inspection else "torch"
            problem = f"Loading {subject} took more than {DEADLINE_SECONDS} s."
            raise UsageError(problem, fix="a smaller model or less data") from error
        finally:
            child.kill()
            child.wait(KILLED_SECONDS)
            assert child.stdin is not None
            child.stdin.close()

        if not path.exists():
            if shutil.disk_usage(folder).free < FULL_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
            output = log.read_text(errors="replace").strip()
            if "No module named 'torch'" in output:
                raise ParalabError("PyTorch is not installed for this Python.", "pip install torch")
            problem = f"The process that inspects the workload exited with code {code}."
            raise ParalabError(problem, detail="\n".join(output.splitlines()[-15:]))
        answer: dict[str, Any] = json.loads(path.read_text())
    if "error" in answer:
        raise UsageError(**answer["error"])
    return answer
