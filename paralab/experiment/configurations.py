"""Plan an experiment's configurations, and skip those that cannot run here."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paralab.analyse.manifest import LeftOut
from paralab.errors import UsageError
from paralab.experiment.planning import look_once, resolve_here
from paralab.launch.launched_by import refuse_inside
from paralab.machine.host import Machine, threads_asked
from paralab.plan.option import to_words
from paralab.plan.plan import Plan, label
from paralab.plan.request import Request
from paralab.workload.reference import check_reference
from paralab.workload.summary import Summary

STEPS = {"cpu": 10, "cuda": 30}  # per configuration and round; the first three warm up
# A step that takes longer than this is slow: more rounds tell us more than longer rounds.
SLOW_SECONDS, SLOW_STEPS = 0.1, 6


@dataclass(frozen=True)
class Configuration:
    """One row in a comparison. An `optional` one is skipped, with the reason, if the machine or the
    model cannot run it."""

    request: Request
    name: str = ""
    optional: bool = False

    @property
    def label(self) -> str:
        return self.name or label(self.request)

    @property
    def command(self) -> str:
        """The `paralab run` command, without the number of measured steps."""
        words = to_words(replace(self.request, steps=None))
        return shlex.join(["paralab", "run", self.request.strategy, *words])


@dataclass(frozen=True)
class Resolved:
    configuration: Configuration
    plan: Plan
    machine: Machine
    summary: Summary


def resolve_all(
    configurations: Sequence[Configuration],
) -> tuple[list[Resolved], list[LeftOut]]:
    """Return (the plans, the skipped configurations and why). All CPU devices get the same number
    of cores, to keep the comparison fair."""
    refuse_inside()
    workloads = [check_reference(each.request.workload) for each in configurations]
    configurations = [
        replace(each, request=replace(each.request, workload=workload))
        for each, workload in zip(configurations, workloads, strict=True)
    ]
    inspected: dict[str, tuple[Machine, Summary]] = {}
    for each, workload in zip(configurations, workloads, strict=True):
        if workload not in inspected:
            same = [
                one.request.strategy for one in configurations if one.request.workload == workload
            ]
            inspected[workload] = look_once(each.request, same)
    left_out: list[LeftOut] = []

    def resolve_one(each: Configuration, threads: int | None) -> Resolved | None:
        machine, summary = inspected[each.request.workload]
        request = replace(
            each.request,
            steps=_steps(each.request, machine, summary),
            threads_per_device=each.request.threads_per_device or threads,
        )
        try:
            plan = resolve_here(request, machine, summary)
        except UsageError as error:
            if not each.optional:
                raise
            left_out.append(LeftOut(name=each.label, reason=error.problem))
            return None
        return Resolved(replace(each, request=request), plan, machine, summary)

    first = [item for each in configurations if (item := resolve_one(each, None))]
    if not first:
        reasons = "\n".join(f"{each.name}: {each.reason}" for each in left_out)
        raise UsageError("None of these configurations can run here.", detail=reasons)
    if first[0].plan.device != "cpu":
        return first, left_out

    most = max(item.plan.num_devices for item in first)
    threads = threads_asked() or max(1, first[0].machine.cores // most)
    again = [resolve_one(item.configuration, threads) for item in first]
    return [item for item in again if item], left_out


def _steps(request: Request, machine: Machine, summary: Summary) -> int:
    if request.steps is not None:
        return request.steps
    if sum(layer.seconds for layer in summary.layers) > SLOW_SECONDS:
        return SLOW_STEPS
    return STEPS["cuda" if machine.gpus and request.device != "cpu" else "cpu"]
