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
from dataclasses import dataclass, replace
from pathlib import Path

from paralab.analyse.compare import Measured, Outcome
from paralab.analyse.manifest import LeftOut, Planned
from paralab.analyse.verify import Verification
from paralab.errors import RunFailed, UsageError
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


def resolve_all(cases: Sequence[Case]) -> tuple[list[Resolved], list[LeftOut]]:
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
    left_out: list[LeftOut] = []

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
            left_out.append(LeftOut(name=case.label, reason=error.problem))
            return None
        return Resolved(replace(case, request=request), plan, machine, summary)

    first = [item for case in cases if (item := resolved(case, None))]
    if not first:
        reasons = "\n".join(f"{each.name}: {each.reason}" for each in left_out)
        raise UsageError("None of these set-ups can be run here.", detail=reasons)
    if first[0].plan.device != "cpu":
        return first, left_out
    most = max(item.plan.num_devices for item in first)
    threads = threads_asked() or max(1, first[0].machine.cores // most)
    return [item for case in first if (item := resolved(case.case, threads))], left_out


def planned(cases: Sequence[Resolved], rounds: int) -> list[Planned]:
    """What the manifest says of the cases before anything is started: names, commands, and where
    their runs will be."""
    entries = []
    for number, item in enumerate(cases):
        place = f"{number:02d}_{slug(item.case.label)}"
        entries.append(
            Planned(
                name=item.case.label,
                command=command(item.case.request),
                request=item.case.request,
                runs=[f"{place}/round{round_ + 1}" for round_ in range(rounds)],
            )
        )
    return entries


def measure(
    folder: RunFolder,
    cases: Sequence[Resolved],
    entries: Sequence[Planned],
    prove: bool,
    say: Callable[[str], None],
    budget_seconds: float | None = None,
) -> Outcome:
    """Train every configuration in every planned round, in a new random order each time."""
    rounds = len(entries[0].runs)
    stopped_by: int | None = None
    failed: dict[int, RunFailed] = {}
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        references = ReferenceRuns(folder.path / "proof", Path(private))
        proofs = _prove(references, cases) if prove else {}
        jobs = list(references.jobs)
        timed: dict[int, tuple[int, int]] = {}  # place among the jobs -> configuration, round
        for round_ in range(rounds):
            order = list(range(len(cases)))
            random.Random(round_).shuffle(order)
            for place, number in enumerate(order):
                item = cases[number]
                run = RunFolder.create(folder.path / entries[number].runs[round_], "")
                record_plan(run, item.plan, item.machine, item.summary)
                timed[len(jobs)] = (number, round_)
                deadline = budget_seconds if round_ >= SURE_ROUNDS and place == 0 else None
                jobs.append(Training(item.plan, run, case=str(number), deadline_seconds=deadline))

        try:
            failed = train_all(folder, jobs, Progress(jobs, timed, rounds, say).poll)
        except KeyboardInterrupt as error:
            stopped_by = number_of(error)
        verified: dict[int, Verification] = {}
        for number, item in enumerate(cases):
            proof = proofs.get(_structure(item))
            if proof and all(job in failed or is_complete(jobs[job]) for job in proof.jobs):
                verified[number] = references.verdict(proof, failed)

    # Only whole rounds are compared: those that every configuration completed that did not fail.
    errors = {timed[place][0]: error.problem for place, error in failed.items() if place in timed}
    cut = {
        round_
        for place, (number, round_) in timed.items()
        if number not in errors and not is_complete(jobs[place])
    }
    runs: dict[int, list[str]] = {number: [] for number in range(len(cases))}
    for place, (number, round_) in timed.items():
        run = jobs[place].folder
        if number not in errors and round_ not in cut:
            finish(run)
            runs[number].append(entries[number].runs[round_])
        elif not has_started(jobs[place]):
            shutil.rmtree(run.path)  # of a round for which there was no time
    if cut and stopped_by is None:
        done = f"{rounds - len(cut)} of {rounds} rounds"
        say(f"stopped after {done}: the time budget is used up (--rounds N runs N rounds)")
    stopped = None if len(cut) < rounds else "it was stopped before its first round was complete"
    return Outcome(
        configurations=[
            Measured(
                name=entry.name,
                command=entry.command,
                request=entry.request,
                runs=runs[number],
                error=errors.get(number, stopped),
                verify=verified.get(number),
            )
            for number, entry in enumerate(entries)
        ],
        rounds=rounds - len(cut),
        interrupted=stopped_by is not None,
        signal=stopped_by,
    )


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
