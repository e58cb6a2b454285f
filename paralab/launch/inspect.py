"""Inspect the machine and the workload, and find out how much memory a plan needs, in child
processes that import torch. This process never imports torch."""

import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paralab.errors import ParalabError, UsageError
from paralab.launch.launched_by import without_launch
from paralab.launch.processes import INSIDE, start
from paralab.machine.host import FULL_BYTES, Machine
from paralab.plan.memory_trial import MemoryTrial
from paralab.plan.plan import Plan
from paralab.workload.summary import Inspection, Summary

DEADLINE_SECONDS = 600
TRIAL_SECONDS = 300  # time limit of a memory trial
MORE_SECONDS = 30  # additional time for each further trial in the same process
KILLED_SECONDS = 60  # how long to wait for a killed process to exit


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


def try_memory(asked: Sequence[tuple[Plan, Sequence[int]]]) -> list[MemoryTrial | str]:
    """Run memory trials of these plans, each with micro-batches of these sizes. If a trial fails,
    return the reason, because only the estimate is lost."""
    question = [{"plan": plan.to_json(), "sizes": list(sizes)} for plan, sizes in asked]
    deadline = TRIAL_SECONDS + MORE_SECONDS * (len(asked) - 1)
    answer = _run("paralab.worker.memory_trial", question, deadline)
    if answer.value is None:
        reason = f"the trial's process exited with code {answer.code}"
        if answer.timed_out:
            reason = f"the trial took more than {deadline} s"
        return [reason] * len(asked)
    return [
        str(each["reason"]) if "reason" in each else msgspec.convert(each["trial"], MemoryTrial)
        for each in answer.value
    ]


def _ask(inspection: Inspection | None) -> dict[str, Any]:
    """Return the inspection's answer. Raise a UsageError for a mistake in the user's file."""
    question = asdict(inspection) if inspection else None
    answer = _run("paralab.worker.inspect_workload", question, DEADLINE_SECONDS)
    if answer.timed_out:
        subject = f"the workload {inspection.workload}" if inspection else "torch"
        problem = f"Loading {subject} took more than {DEADLINE_SECONDS} s."
        raise UsageError(problem, fix="a smaller model or less data")
    if answer.value is None:
        if "No module named 'torch'" in answer.output:
            raise ParalabError("PyTorch is not installed for this Python.", "pip install torch")
        problem = f"The process that inspects the workload exited with code {answer.code}."
        raise ParalabError(problem, detail="\n".join(answer.output.splitlines()[-15:]))
    if "error" in answer.value:
        raise UsageError(**answer.value["error"])
    value: dict[str, Any] = answer.value
    return value


class _Answer(NamedTuple):
    """A child process's answer and exit code. `value` is None if it wrote no answer."""

    value: Any
    code: int | None
    output: str
    timed_out: bool = False


def _run(module: str, question: Any, deadline_seconds: float) -> _Answer:
    """Start the process that writes the answer, and wait for it."""
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        path, asked, log = (Path(folder, n) for n in ("answer.json", "question.json", "log.txt"))
        asked.write_text(json.dumps(question))
        environment = {**without_launch(os.environ), INSIDE: "inspection"}
        with log.open("wb") as file:
            child = start(module, [str(path), str(asked)], environment, file)
        try:
            code = child.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            return _Answer(None, None, "", timed_out=True)
        finally:
            child.kill()
            child.wait(KILLED_SECONDS)
            assert child.stdin is not None
            child.stdin.close()

        output = log.read_text(errors="replace").strip()
        if path.exists():
            return _Answer(json.loads(path.read_text()), code, output)
        if shutil.disk_usage(folder).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        return _Answer(None, code, output)
