"""Inspect the machine and the workload, and find out how much memory a plan needs, in child
processes that import torch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import msgspec

from paralab.errors import ParalabError, UsageError
from paralab.launch.questions import ask
from paralab.machine.host import Machine
from paralab.machine.signals import describe_exit
from paralab.plan.memory_trial import MemoryTrial
from paralab.plan.plan import Plan
from paralab.workload.summary import Inspection, Summary

DEADLINE_SECONDS = 600
TRIAL_SECONDS = 300  # time limit of a memory trial
MORE_SECONDS = 30  # additional time for each further trial in the same process


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
    answer = ask("paralab.worker.inspection.memory_trial", question, deadline, "inspection")
    if answer.value is None:
        took = f"the trial took more than {deadline} s"
        reason = (
            took if answer.code is None else f"the trial's process {describe_exit(answer.code)}"
        )
        return [reason] * len(asked)
    return [
        str(each["reason"]) if "reason" in each else msgspec.convert(each["trial"], MemoryTrial)
        for each in answer.value
    ]


def _ask(inspection: Inspection | None) -> dict[str, Any]:
    """Return the inspection's answer. Raise a UsageError for a mistake in the user's file."""
    question = asdict(inspection) if inspection else None
    module = "paralab.worker.inspection.inspect_workload"
    answer = ask(module, question, DEADLINE_SECONDS, "inspection")
    if answer.code is None:
        subject = f"the workload {inspection.workload}" if inspection else "torch"
        problem = f"Loading {subject} took more than {DEADLINE_SECONDS} s."
        raise UsageError(problem, fix="a smaller model or less data")
    if answer.value is None:
        if "No module named 'torch'" in answer.output:
            raise ParalabError("PyTorch is not installed for this Python.", "pip install torch")
        problem = f"The process that inspects the workload {describe_exit(answer.code)}."
        fix = "call the workload's function without paralab, to see which line ends the process"
        raise ParalabError(
            problem, fix if inspection else None, detail="\n".join(answer.output.splitlines()[-15:])
        )
    if "error" in answer.value:
        raise UsageError(**answer.value["error"])
    value: dict[str, Any] = answer.value
    return value
