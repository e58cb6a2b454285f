"""`paralab compare` and `scale`: measure configurations side by side. Verify them first, then train
them in turn, round after round, in the same processes.

`tune` and `practical` also use this module. An experiment folder has one run folder per
configuration and round, and all results are computed from these run folders.
"""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from msgspec.structs import replace as replace_fields

from paralab.analyse.compare import Comparison, Measured, Outcome, comparison_of
from paralab.analyse.manifest import About, Planned
from paralab.analyse.verify import Verification
from paralab.errors import NO_MEMORY, RunFailed, UsageError
from paralab.experiment.configurations import (
    Configuration,
    Resolved,
    resolve_all,
    with_distinct_names,
)
from paralab.experiment.planning import create_run, slug
from paralab.experiment.reference_runs import ReferencePair, ReferenceRuns
from paralab.experiment.run import finish
from paralab.experiment.shared_launch import has_started, is_complete, train_all
from paralab.launch.inspect import Inspected
from paralab.launch.job import Print, Training
from paralab.machine.signals import interrupted, number_of
from paralab.plan.batches import LESS
from paralab.plan.plan import label
from paralab.plan.request import Request, in_fp64
from paralab.record.folder import RunFolder
from paralab.units import plural

VERIFY_STEPS = 3
ROUNDS = 5
MOST_ROUNDS = 1000
SURE_ROUNDS = 3  # without --rounds, run at least this many rounds, and more if there is time
BUDGET_SECONDS = 60.0  # time for verification and rounds without --rounds
Round = list[Training]  # a run of each configuration; `case` is the configuration's number


def compare(
    configurations: Sequence[Configuration],
    *,
    kind: str = "compare",
    about: About | None = None,
    rounds: int | None = None,
    verify: bool = True,
    out: Path | None = None,
    say: Print = lambda line: None,
    more: Callable[[Comparison, float], bool] = lambda result, seconds: False,
    baseline: str | None = None,
    inspected: Inspected | None = None,
) -> Comparison:
    """Measure the configurations and compute the comparison from the run folders.

    more       gets the result and the seconds spent so far, and decides whether to measure the same
               number of rounds again
    baseline   the name of the configuration to compare with, if it is not `single`
    inspected  the workload, if it was already inspected
    """
    started = time.perf_counter()
    if rounds is not None and rounds < 1:
        fix = "1 round, or 3 for a confidence interval"
        raise UsageError(f"{rounds} rounds are too few.", fix)
    if rounds is not None and rounds > MOST_ROUNDS:
        fix = f"--rounds {MOST_ROUNDS} or fewer; 5 are usually enough"
        raise UsageError(f"{rounds} rounds are too many: each has a run folder.", fix)
    workloads = list(dict.fromkeys(each.request.workload for each in configurations))
    if kind == "compare" and len(workloads) > 1:
        problem = f"Different workloads cannot be compared: {', '.join(workloads)}."
        raise UsageError(problem, fix="give --workload once, outside the quotes")
    resolved, left_out = resolve_all(with_distinct_names(configurations), inspected, verify)

    folder = RunFolder.create(out, f"{kind}_{slug(resolved[0].inspected.summary.name)}")
    folder.write_manifest(
        kind=kind,
        about=(about or About()).to_dict(),
        baseline=baseline,
        machine=asdict(resolved[0].inspected.machine),
        workload=asdict(resolved[0].inspected.summary),
        left_out=[each.to_dict() for each in left_out],
        configurations=[each.to_dict() for each in _plan_rounds(resolved, rounds or ROUNDS)],
    )
    measured, done = None, 0
    while True:
        entries = _plan_rounds(resolved, rounds or ROUNDS, done)
        budget = None if rounds or done else BUDGET_SECONDS
        latest = _measure(folder, resolved, entries, verify and not done, say, budget)
        measured = _combine(measured, latest) if measured else latest
        (folder.path / "outcome.json").unlink(missing_ok=True)
        folder.write("outcome.json", measured.to_dict())
        if measured.signal is not None or measured.rounds == done:
            break
        done = measured.rounds
        if not more(comparison_of(folder.path), time.perf_counter() - started):
            break
    seconds = round(time.perf_counter() - started, 3)
    result = replace_fields(comparison_of(folder.path), seconds=seconds)
    folder.write("result.json", result.to_dict())
    if measured.signal is not None:
        after = f" after {plural(measured.rounds, 'complete round')}"
        raise interrupted(measured.signal, f"{after}. See them: paralab show {folder.path}")
    return result


def _combine(before: Outcome, after: Outcome) -> Outcome:
    """Add the second measurement's rounds, unless a configuration that succeeded before fails in
    them."""
    pairs = list(zip(before.configurations, after.configurations, strict=True))
    if any(new.error and not old.error for old, new in pairs):
        return replace_fields(before, signal=after.signal)
    configurations = [replace_fields(old, runs=[*old.runs, *new.runs]) for old, new in pairs]
    return replace_fields(after, configurations=configurations, rounds=before.rounds + after.rounds)


def _plan_rounds(configurations: Sequence[Resolved], rounds: int, first: int = 0) -> list[Planned]:
    """Return the manifest entries. `first` is the number of rounds that have already run."""
    entries = []
    for number, each in enumerate(item.configuration for item in configurations):
        place, numbers = f"{number:02d}_{slug(each.label)}", range(first + 1, first + rounds + 1)
        runs = [f"{place}/round{round_}" for round_ in numbers]
        entry = Planned(name=each.label, command=each.command, request=each.request, runs=runs)
        entries.append(entry)
    return entries


def _measure(
    folder: RunFolder,
    configurations: Sequence[Resolved],
    entries: Sequence[Planned],
    verify: bool,
    say: Print,
    budget_seconds: float | None = None,
) -> Outcome:
    """Train each configuration in each planned round. First verify a few steps of each in fp64."""
    exact = [
        replace(in_fp64(item.configuration.request), steps=VERIFY_STEPS, epochs=None)
        for item in configurations
    ]
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        references = ReferenceRuns(folder.path / "verify", Path(private))
        pairs: dict[Request, ReferencePair] = {}
        for item, request in zip(configurations, exact, strict=True):
            if verify and request not in pairs:  # precisions such as fp32 and bf16 share a pair
                name = f"{len(pairs):02d}_{slug(label(request))}"
                pairs[request] = references.add(name, request, item.inspected)

        rounds = _create_rounds(folder, configurations, entries, budget_seconds)
        trainings = [*references.trainings, *chain(*rounds)]
        numbers = [run.rpartition("round")[2] for run in entries[0].runs]
        titles = ["verifying that all configurations train the same way"] * len(
            references.trainings
        )
        titles += [f"round {n} of {numbers[-1]}" for n in numbers for _ in entries]
        failed: dict[int, RunFailed] = {}
        smaller: dict[int, Verification] = {}
        stopped_by: int | None = None
        try:
            failed = train_all(folder, trainings, Progress(trainings, titles, say).poll)
            full = {n for n, error in failed.items() if any(w in error.problem for w in NO_MEMORY)}
            again = {
                number: (request, configurations[number].inspected)
                for number, request in enumerate(exact)
                if request in pairs and not full.isdisjoint(pairs[request].numbers)
            }
            smaller = _prove_with_less(folder, again)
        except KeyboardInterrupt as error:
            stopped_by = number_of(error)

        verified = {
            number: references.judge(pair, failed)
            for number, request in enumerate(exact)
            if (pair := pairs.get(request))
            and all(run in failed or is_complete(trainings[run]) for run in pair.numbers)
        } | smaller

    errors = {trainings[run].case: error.problem for run, error in failed.items()}
    complete = _finish_rounds(rounds, errors)
    if len(complete) < len(rounds) and stopped_by is None:
        done = f"{len(complete)} of {len(rounds)} rounds"
        say(f"stopped after {done}: the time budget is used up (--rounds N runs N rounds)")
    stopped = None if complete else "it was stopped before its first round was complete"
    measured = []
    for number, entry in enumerate(entries):
        problem = errors.get(str(number))
        runs = [] if problem else [entry.runs[round_] for round_ in complete]
        judged = {"error": problem or stopped, "verify": verified.get(number)}
        measured.append(Measured.like(entry, runs=runs, **judged))
    return Outcome(configurations=measured, rounds=len(complete), signal=stopped_by)


def _prove_with_less(
    folder: RunFolder, again: Mapping[int, tuple[Request, Inspected]]
) -> dict[int, Verification]:
    """Repeat proofs that ran out of memory, with a part of the batch."""
    if not again:
        return {}
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        references = ReferenceRuns(folder.path / "verify" / "less", Path(private))
        pairs: dict[int, tuple[int, ReferencePair]] = {}
        for number, (request, inspected) in again.items():
            batch = max(1, (request.batch_size or inspected.summary.batch_size) // LESS)
            with suppress(UsageError):  # too few samples to split
                less = replace(request, batch_size=batch)
                pairs[number] = batch, references.add(f"{number:02d}", less, inspected)
        failed = train_all(folder, references.trainings)
        return {
            number: replace_fields(references.judge(pair, failed), proof_batch=batch)
            for number, (batch, pair) in pairs.items()
        }


def _create_rounds(
    folder: RunFolder,
    configurations: Sequence[Resolved],
    entries: Sequence[Planned],
    budget_seconds: float | None,
) -> list[Round]:
    """Create the run folders. Each round trains the configurations in a new random order."""
    rounds = []
    for round_ in range(len(entries[0].runs)):
        order = list(range(len(configurations)))
        random.Random(round_).shuffle(order)
        budget = budget_seconds if round_ >= SURE_ROUNDS else None
        rounds.append(
            [
                create_run(
                    folder.path / entries[number].runs[round_],
                    configurations[number].plan,
                    configurations[number].inspected,
                    case=str(number),
                    deadline_seconds=None if place else budget,
                )
                for place, number in enumerate(order)
            ]
        )
    return rounds


def _finish_rounds(rounds: Sequence[Round], errors: Mapping[str, str]) -> list[int]:
    """Return the rounds finished by all configurations that have no error. Write the results of
    those runs, and delete runs that never started."""
    complete = []
    for number, trainings in enumerate(rounds):
        good = [each for each in trainings if each.case not in errors]
        if all(is_complete(each) for each in good):
            complete.append(number)
            for each in good:
                finish(each.folder)
        for each in trainings:
            if not has_started(each):  # no time was left, or the configuration failed earlier
                shutil.rmtree(each.folder.path)
    return complete


class Progress:
    """Prints a run's title when the event files show that the run has begun."""

    def __init__(self, trainings: Sequence[Training], titles: Sequence[str], say: Print) -> None:
        self.trainings, self.titles, self.say = trainings, titles, say
        self.next, self.printed = 0, ""

    def poll(self) -> None:
        """Print the title of the newest run. Runs start in order, but some may be skipped."""
        for place in reversed(range(self.next, len(self.trainings))):
            if (self.trainings[place].folder.events / "rank0.jsonl").exists():
                self.next = place + 1
                if self.titles[place] != self.printed:
                    self.printed = self.titles[place]
                    self.say(self.printed)
                return
