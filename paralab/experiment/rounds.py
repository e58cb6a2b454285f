"""Measure several configurations side by side: verify them first, then train them round after round
in the same processes.

`compare`, `scale`, `tune`, and `practical` share this. The folder of an experiment has one run
folder per configuration and round, and a manifest that says which is which. Every number is
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
SURE_ROUNDS = 3  # always run; the others only if there is time, unless --rounds was given
BUDGET_SECONDS = 60.0  # for the proofs and the rounds if --rounds was not given
STEPS = {"cpu": 10, "cuda": 30}  # per configuration and round; the first three are warm-up
# A step longer than SLOW_SECONDS: more rounds say more than longer ones.
SLOW_SECONDS, SLOW_STEPS = 0.1, 6


@dataclass(frozen=True)
class Configuration:
    """A configuration to measure. `optional`: leave it out if the machine or the model cannot run
    it."""

    request: Request
    name: str = ""
    optional: bool = False

    @property
    def label(self) -> str:
        return self.name or label(self.request)


@dataclass(frozen=True)
class Resolved:
    configuration: Configuration
    plan: Plan
    machine: Machine
    summary: Summary


def command(request: Request) -> str:
    """The `paralab run` command of a request, without the number of steps it was tried for."""
    return shlex.join(["paralab", "run", request.strategy, *to_words(replace(request, steps=None))])


def resolve_all(configurations: Sequence[Configuration]) -> tuple[list[Resolved], list[LeftOut]]:
    """(the plans, what is left out and why). All CPU devices get the same share of the cores;
    otherwise it would not be a comparison."""
    refuse_inside()
    configurations = [
        replace(
            configuration,
            request=replace(
                configuration.request, workload=check_reference(configuration.request.workload)
            ),
        )
        for configuration in configurations
    ]
    seen: dict[str, tuple[Machine, Summary]] = {}
    for configuration in configurations:
        name = configuration.request.workload
        if name not in seen:
            layers = any(
                needs_layers(c.request.strategy)
                for c in configurations
                if c.request.workload == name
            )
            units = any(
                needs_units(c.request.strategy)
                for c in configurations
                if c.request.workload == name
            )
            seen[name] = look_once(
                name,
                configuration.request.device,
                layers,
                configuration.request.batch_size,
                1,
                units,
            )
    left_out: list[LeftOut] = []

    def resolved(configuration: Configuration, threads: int | None) -> Resolved | None:
        machine, summary = seen[configuration.request.workload]
        usual = STEPS["cuda" if machine.gpus and configuration.request.device != "cpu" else "cpu"]
        usual = (
            SLOW_STEPS if sum(layer.seconds for layer in summary.layers) > SLOW_SECONDS else usual
        )
        steps = usual if configuration.request.steps is None else configuration.request.steps
        request = replace(
            configuration.request,
            steps=steps,
            threads_per_device=configuration.request.threads_per_device or threads,
        )
        try:
            plan = resolve(request, machine, summary, probe_once, threads_asked())
        except UsageError as error:
            if not configuration.optional:
                raise
            left_out.append(LeftOut(name=configuration.label, reason=error.problem))
            return None
        return Resolved(replace(configuration, request=request), plan, machine, summary)

    first = [item for configuration in configurations if (item := resolved(configuration, None))]
    if not first:
        reasons = "\n".join(f"{each.name}: {each.reason}" for each in left_out)
        raise UsageError("None of these configurations can run here.", detail=reasons)
    if first[0].plan.device != "cpu":
        return first, left_out
    most = max(item.plan.num_devices for item in first)
    threads = threads_asked() or max(1, first[0].machine.cores // most)
    return [
        item for configuration in first if (item := resolved(configuration.configuration, threads))
    ], left_out


def planned(configurations: Sequence[Resolved], rounds: int) -> list[Planned]:
    """The configurations as the manifest lists them before anything starts: names, commands, and
    run folders."""
    entries = []
    for number, item in enumerate(configurations):
        place = f"{number:02d}_{slug(item.configuration.label)}"
        entries.append(
            Planned(
                name=item.configuration.label,
                command=command(item.configuration.request),
                request=item.configuration.request,
                runs=[f"{place}/round{round_ + 1}" for round_ in range(rounds)],
            )
        )
    return entries


def measure(
    folder: RunFolder,
    configurations: Sequence[Resolved],
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
        proofs = _prove(references, configurations) if prove else {}
        jobs = list(references.jobs)
        timed: dict[int, tuple[int, int]] = {}  # place among the jobs -> configuration, round
        for round_ in range(rounds):
            order = list(range(len(configurations)))
            random.Random(round_).shuffle(order)
            for place, number in enumerate(order):
                item = configurations[number]
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
        for number, item in enumerate(configurations):
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
    runs: dict[int, list[str]] = {number: [] for number in range(len(configurations))}
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
    """Reports when a round starts; the event files show how far the ranks are."""

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
        """Jobs start in order, but a hopeless one is skipped."""
        for place in range(len(self.jobs) - 1, self.next - 1, -1):
            if (self.jobs[place].folder.events / "rank0.jsonl").exists():
                self.next = place + 1
                self._tell(self.timed.get(place, (0, -1))[1])
                return

    def _tell(self, round_: int) -> None:
        if round_ != self.told:
            self.told = round_
            self.say(
                "verifying that all configurations train the same"
                if round_ < 0
                else f"round {round_ + 1} of {self.rounds}"
            )


def _structure(item: Resolved) -> Request:
    """The configuration to verify: in fp64, so that a mistake cannot hide behind rounding."""
    return replace(
        item.configuration.request,
        precision="fp64",
        loss_scale=None,
        no_scaler=None,
        steps=PROOF_STEPS,
        epochs=None,
    )


def _prove(beside: ReferenceRuns, configurations: Sequence[Resolved]) -> dict[Request, Proof]:
    """A proof for every structure: the same configuration in fp32 and bf16 has the same proof."""
    proofs: dict[Request, Proof] = {}
    for item in configurations:
        request = _structure(item)
        if request not in proofs:
            name = f"{len(proofs):02d}_{slug(label(request))}"
            proofs[request] = beside.add(name, request, item.machine, item.summary)
    return proofs
