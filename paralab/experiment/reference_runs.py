"""Train the configurations to verify, train their references on one device, and compare them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields

from paralab.analyse.judge import (
    compared_with_simulation,
    failed_verification,
    judge,
    with_excuse,
)
from paralab.analyse.verify import Verification
from paralab.errors import RunFailed
from paralab.experiment.planning import create_run, resolve_here
from paralab.launch.inspect import Inspected
from paralab.launch.job import Training
from paralab.plan.lossy import Simulation, provable, rounds_in_any_order, simulation_of
from paralab.plan.plan import Plan
from paralab.plan.request import Request, in_fp64, on_one_device
from paralab.record.events import Verify
from paralab.record.reader import read_events


@dataclass(frozen=True)
class ReferencePair:
    """The indexes of the runs that verify one configuration."""

    exact: int  # the run that must be equal to its reference
    as_asked: int | None  # the run as requested, if it may differ for a known reason
    split_problem: str | None  # why no strategy can split a batch
    hook_problem: str | None  # what may be wrong if the two differ

    @property
    def numbers(self) -> list[int]:
        return [self.exact] if self.as_asked is None else [self.exact, self.as_asked]


# The summary fields of a workload without known reasons for differences.
UNCAUSED: dict[str, Any] = {"random": False, "state": (), "batch_norms": 0, "casts": False}


class ReferenceRuns:
    """The `trainings` run in this order, with each reference before the first run that needs it."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder, self.private = folder, private
        self.trainings: list[Training] = []
        self.references: dict[tuple[Request, tuple[str, ...], Simulation | None], str] = {}

    def add(self, name: str, request: Request, inspected: Inspected) -> ReferencePair:
        """Add the runs that compare this configuration with a single device.

        If the two may differ for a known reason (`Plan.differences`), the exact pair runs in fp64
        without those causes (`paralab.workload.verify_controls`). A second pair runs as requested
        and measures their effect. If the configuration is lossy, the exact pair compares it with a
        simulation.
        """
        # Dropout is off on both sides, because it could mask an error.
        summary = replace(inspected.summary, dropout=False)
        given = Inspected(inspected.machine, summary)
        plan = resolve_here(request, given)
        shown = provable(request, plan.num_steps)
        request = replace(request, steps=shown.steps, epochs=shown.epochs)
        hooked = [f"the gradient hook of {n} runs for each part of a batch" for n in summary.hooked]
        problems = summary.split_problem, next(iter(hooked), None)
        if not plan.differences:
            return ReferencePair(self._add_pair(name, request, given), None, *problems)

        still = given._replace(summary=replace(summary, **UNCAUSED))
        control = (*summary.controls, *(["rank_order"] if rounds_in_any_order(plan) else []))
        exact = self._add_pair(name, in_fp64(shown), still, control, simulation_of)
        as_asked = self._add_pair(f"{name}-as-asked", request, given)
        return ReferencePair(exact, as_asked, *problems)

    def _add_pair(
        self,
        name: str,
        request: Request,
        inspected: Inspected,
        control: tuple[str, ...] = (),
        simulate: Callable[[Plan], Simulation | None] = lambda plan: None,
    ) -> int:
        """Add a run for this configuration after its reference, and return the run's number."""

        def add(name: str, plan: Plan, **extras: str) -> None:
            self.trainings.append(create_run(self.folder / name, plan, inspected, extras=extras))

        plan = replace(resolve_here(request, inspected), control=control)
        single = replace(on_one_device(request, plan.batch_size), loss_scale=plan.loss_scale)
        simulation = simulate(plan)
        if simulation:  # with the same number of threads, sums round the same way
            single = replace(single, threads_per_device=plan.threads_per_device)
        key = single, control, simulation
        if key not in self.references:
            self.references[key] = str(self.private / f"reference{len(self.references)}.pt")
            reference = resolve_here(single, inspected)
            reference = replace(reference, control=control, simulation=simulation)
            place = f"reference{len(self.references)}"
            add(place, reference, save_reference=self.references[key])
        add(name, plan, compare_with=self.references[key])
        return len(self.trainings) - 1

    def is_reference(self, number: int) -> bool:
        return "save_reference" in self.trainings[number].extras

    def judge(self, pair: ReferencePair, failed: dict[int, RunFailed]) -> Verification:
        """Judge whether a configuration equals its reference. `failed` maps runs to errors."""
        plan = self.trainings[pair.exact].plan
        reference = "the simulation" if plan.lossy else "the single device"
        problem = pair.split_problem or pair.hook_problem
        exact = self._judge(pair.exact, failed, problem, reference)
        exact = replace_fields(exact, control=plan.control)
        if plan.lossy:
            # The simulation splits batches in the same way, so it cannot show this problem.
            if pair.split_problem and plan.replicas * plan.accumulate > 1:
                exact = replace_fields(exact, equal=False, cause=pair.split_problem)
            exact = compared_with_simulation(exact)
        if pair.as_asked is None:
            return exact
        as_asked = self._judge(pair.as_asked, failed)
        return with_excuse(exact, self.trainings[pair.as_asked].plan, as_asked)

    def _judge(
        self,
        number: int,
        failed: dict[int, RunFailed],
        split_problem: str | None = None,
        reference: str = "the single device",
    ) -> Verification:
        training = self.trainings[number]
        if number in failed:
            return failed_verification(training.plan.precision, failed[number].problem)
        ranks = read_events(training.folder.path).values()
        events = [event for rank in ranks for event in rank if isinstance(event, Verify)]
        return judge(training.plan.precision, events, split_problem, reference)
