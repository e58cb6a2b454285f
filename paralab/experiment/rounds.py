"""Several set-ups measured side by side: proved equal first, then trained in turns, round after
round, in the same processes.

What `compare`, `scale`, `tune` and `practical` share. An experiment's folder has one run folder per
set-up and round, and a manifest that says which is which; everything that is told about it is
computed from there.
"""

from __future__ import annotations

import random
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paralab.errors import UsageError
from paralab.experiment.planning import look_once, probe_once, record_plan, slug
from paralab.experiment.reference_runs import Proof, ReferenceRuns
from paralab.experiment.run import finish
from paralab.experiment.shared_launch import has_started, is_complete, train_all
from paralab.launch.job import Training
from paralab.launch.launched_by import refuse_inside
from paralab.machine.host import Machine, threads_asked
from paralab.machine.signals import number_of
from paralab.plan.label import label
from paralab.plan.option import to_words
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.plan.resolve import needs_layers, resolve
from paralab.plan.sharding import needs_units
from paralab.record.folder import RunFolder
from paralab.workload.reference import check_reference
from paralab.workload.summary import Summary

PROOF_STEPS = 3
ROUNDS = 5
SURE_ROUNDS = 3  # are always done; the others only if there is time, unless their number was given
BUDGET_SECONDS = (
    60.0  # for the proofs and the rounds of a comparison whose number of rounds was not given
)
STEPS = {"cpu": 10, "cuda": 30}  # of each set-up in each round; the first three warm up
SLOW_SECONDS, SLOW_STEPS = (
    0.1,
    6,
)  # of a model whose step takes longer: more rounds tell more than longer ones


@dataclass(frozen=True)
class Case:
    """One set-up. `optional`: it is left out where the machine or the model cannot, and the reason
    is told."""

    request: Request
    name: str = ""
    optional: bool = False

    @property
    def label(self) -> str:
        return self.name or label(self.request)


@dataclass(frozen=True)
class Resolved:
    case: Case
    plan: Plan
    machine: Machine
    summary: Summary


def command(request: Request) -> str:
    """The `paralab run` command of a request, without the number of steps it was tried for."""
    return shlex.join(["paralab", "run", request.strategy, *to_words(replace(request, steps=None))])


def resolve_all(cases: Sequence[Case]) -> tuple[list[Resolved], list[dict[str, str]]]:
    """(the plans, what is left out and why). All CPU devices get the same share of the cores, or it
    would be no comparison."""
    refuse_inside()
    cases = [
        replace(
            case, request=replace(case.request, workload=check_reference(case.request.workload))
        )
        for case in cases
    ]
    seen: dict[str, tuple[Machine, Summary]] = {}
    for case in cases:
        name = case.request.workload
        if name not in seen:
            layers = any(
                needs_layers(c.request.strategy) for c in cases if c.request.workload == name
            )
            units = any(
                needs_units(c.request.strategy) for c in cases if c.request.workload == name
            )
            seen[name] = look_once(
                name, case.request.device, layers, case.request.batch_size, 1, units
            )
    left_out: list[dict[str, str]] = []

    def resolved(case: Case, threads: int | None) -> Resolved | None:
        machine, summary = seen[case.request.workload]
        usual = STEPS["cuda" if machine.gpus and case.request.device != "cpu" else "cpu"]
        usual = (
            SLOW_STEPS if sum(layer.seconds for layer in summary.layers) > SLOW_SECONDS else usual
        )
        steps = usual if case.request.steps is None else case.request.steps
        request = replace(
            case.request, steps=steps, threads_per_device=case.request.threads_per_device or threads
        )
        try:
            plan = resolve(request, machine, summary, probe_once, threads_asked())
        except UsageError as error:
            if not case.optional:
                raise
            left_out.append({"name": case.label, "reason": error.problem})
            return None
        return Resolved(replace(case, request=request), plan, machine, summary)

    first = [item for case in cases if (item := resolved(case, None))]
    if not first:
        reasons = "\n".join(f"{entry['name']}: {entry['reason']}" for entry in left_out)
        raise UsageError("None of these set-ups can be run here.", detail=reasons)
    if first[0].plan.device != "cpu":
        return first, left_out
    most = max(item.plan.num_devices for item in first)
    threads = threads_asked() or max(1, first[0].machine.cores // most)
    return [item for case in first if (item := resolved(case.case, threads))], left_out


def planned(folder: RunFolder, cases: Sequence[Resolved], rounds: int) -> list[dict[str, Any]]:
    """What the manifest says of the cases before anything is started: names, commands, and where
    their runs will be."""
    entries = []
    for number, item in enumerate(cases):
        place = f"{number:02d}_{slug(item.case.label)}"
        asked = item.case.request
        runs = [f"{place}/round{round_ + 1}" for round_ in range(rounds)]
        entries.append(
            {
                "name": item.case.label,
                "command": command(asked),
                "request": asdict(asked),
                "runs": runs,
                "error": None,
            }
        )
    return entries


def measure(
    folder: RunFolder,
    cases: Sequence[Resolved],
    entries: list[dict[str, Any]],
    prove: bool,
    say: Callable[[str], None],
    budget_seconds: float | None = None,
) -> dict[str, Any]:
    """Train every case in every planned round, the order shuffled anew each time; return the
    outcome: what came of the plan."""
    jobs: list[Training] = []
    rounds = len(entries[0]["runs"])
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        beside = ReferenceRuns(folder.path / "proof", Path(private))
        proofs = _prove(beside, cases) if prove else {}
        jobs += beside.jobs
        timed: dict[int, tuple[int, int]] = {}
        for round_ in range(rounds):
            order = list(range(len(cases)))
            random.Random(round_).shuffle(order)
            for place, number in enumerate(order):
                item = cases[number]
                run = RunFolder.create(folder.path / entries[number]["runs"][round_], "")
                record_plan(run, item.plan, item.machine, item.summary)
                timed[len(jobs)] = (number, round_)
                deadline = budget_seconds if round_ >= SURE_ROUNDS and place == 0 else None
                jobs.append(Training(item.plan, run, case=str(number), deadline_seconds=deadline))
        stopped_by: int | None = None
        try:
            failed = train_all(folder, jobs, Progress(jobs, timed, rounds, say).poll)
        except KeyboardInterrupt as error:
            failed, stopped_by = {}, number_of(error)
        for number, item in enumerate(cases):
            proof = proofs.get(_structure(item))
            known = proof is not None and all(
                job in failed or is_complete(jobs[job]) for job in proof.jobs
            )
            entries[number]["parity"] = (
                beside.verdict(proof, failed) if proof is not None and known else None
            )
    # Only whole rounds are compared: those that every set-up has come through that did not fail.
    gone = {number for place, (number, _) in timed.items() if place in failed}
    cut = {
        round_
        for place, (number, round_) in timed.items()
        if number not in gone and not is_complete(jobs[place])
    }
    for place, (number, round_) in timed.items():
        run = jobs[place].folder
        if number not in gone and round_ not in cut:
            finish(run)
            continue
        entries[number]["runs"].remove(str(run.path.relative_to(folder.path)))
        if place in failed:
            entries[number]["error"] = failed[place].problem
        if not has_started(jobs[place]):
            shutil.rmtree(run.path)  # made for a round for which there was no time
    for entry in entries:
        if not entry["runs"] and not entry["error"]:
            entry["error"] = "it was stopped before its first round was whole"
    if cut and stopped_by is None:
        say(
            f"stopped after {rounds - len(cut)} of {rounds} rounds: the time is over (--rounds N takes as many as are wanted)"
        )
    return {
        "cases": entries,
        "rounds": rounds - len(cut),
        "interrupted": stopped_by is not None,
        "signal": stopped_by,
    }


class Progress:
    """Says when a round begins; the event files tell how far the ranks are."""

    def __init__(
        self,
        jobs: list[Training],
        timed: dict[int, tuple[int, int]],
        rounds: int,
        say: Callable[[str], None],
    ) -> None:
        self.jobs, self.timed, self.rounds, self.say = jobs, timed, rounds, say
        self.next = 0
        self.told = -2

    def poll(self) -> None:
        """Jobs are begun in order, but one that is hopeless is passed over."""
        for place in range(len(self.jobs) - 1, self.next - 1, -1):
            if (self.jobs[place].folder.events / "rank0.jsonl").exists():
                self.next = place + 1
                self._tell(self.timed.get(place, (0, -1))[1])
                return

    def _tell(self, round_: int) -> None:
        if round_ != self.told:
            self.told = round_
            self.say(
                "proving that it is the same training"
                if round_ < 0
                else f"round {round_ + 1} of {self.rounds}"
            )


def _structure(item: Resolved) -> Request:
    """What is proved: the set-up without its precision, in fp64, where a mistake cannot hide behind
    rounding."""
    return replace(
        item.case.request,
        precision="fp64",
        loss_scale=None,
        no_scaler=None,
        steps=PROOF_STEPS,
        epochs=None,
    )


def _prove(beside: ReferenceRuns, cases: Sequence[Resolved]) -> dict[Request, Proof]:
    """A proof for every structure. In fp32 and bf16 the same set-up has the same proof."""
    proofs: dict[Request, Proof] = {}
    for item in cases:
        request = _structure(item)
        if request not in proofs:
            name = f"{len(proofs):02d}_{slug(label(request))}"
            proofs[request] = beside.add(name, request, item.machine, item.summary)
    return proofs
