"""`paralab compare` and `scale`: measure configurations side by side. First verify them, then train
them in turn, round after round, in the same processes.

`tune` and `practical` also use this module. An experiment folder has one run folder per
configuration and round, and all results are computed from these run folders.
"""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from msgspec.structs import asdict as asdict_fields
from msgspec.structs import replace as replace_fields

from paralab.analyse.compare import Comparison, Measured, Outcome, comparison_of
from paralab.analyse.manifest import About, Planned
from paralab.analyse.verify import Verification
from paralab.errors import RunFailed, UsageError
from paralab.experiment.configurations import (
    Configuration,
    Resolved,
    resolve_all,
    with_distinct_names,
)
from paralab.experiment.planning import record_plan, slug
from paralab.experiment.reference_runs import ReferencePair, ReferenceRuns
from paralab.experiment.run import finish
from paralab.experiment.shared_launch import has_started, is_complete, train_all
from paralab.launch.job import Print, Training
from paralab.machine.signals import interrupted, number_of
from paralab.plan.plan import label
from paralab.plan.request import Request, in_fp64
from paralab.record.folder import RunFolder
from paralab.units import plural

VERIFY_STEPS = 3
ROUNDS = 5
SURE_ROUNDS = 3  # without --rounds, always run this many, and run more only if there is time
BUDGET_SECONDS = 60.0  # for verification and rounds, unless --rounds is given
VERIFYING = -1  # the round number for runs that verify


@dataclass(frozen=True)
class Turn:
    """One run of a configuration in a round. Both numbers are `VERIFYING` if it verifies."""

    training: Training
    number: int
    round: int


def compare(
    configurations: Sequence[Configuration],
    *,
    kind: str = "compare",
    about: About | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    verify: bool = True,
    out: Path | None = None,
    say: Print = lambda line: None,
    more: Callable[[Comparison, float], bool] = lambda result, seconds: False,
) -> Comparison:
    """Measure the configurations and compute the comparison from the run folders. `more` gets the
    result and the seconds spent so far, and decides whether to measure the same number of rounds
    again."""
    started = time.perf_counter()
    _check(configurations, kind, rounds)
    if steps is not None:
        configurations = [
            replace(each, request=replace(each.request, steps=each.request.steps or steps))
            for each in configurations
        ]
    resolved, left_out = resolve_all(with_distinct_names(configurations))

    folder = RunFolder.create(out, f"{kind}_{slug(resolved[0].summary.name)}")
    folder.write_manifest(
        kind=kind,
        about=(about or About()).to_dict(),
        machine=asdict(resolved[0].machine),
        workload=asdict(resolved[0].summary),
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
        folder.write_outcome(measured.to_dict())
        if measured.signal is not None or measured.rounds == done:
            break
        done = measured.rounds
        if not more(comparison_of(folder.path), time.perf_counter() - started):
            break
    seconds = round(time.perf_counter() - started, 3)
    result = replace_fields(comparison_of(folder.path), seconds=seconds)
    folder.write_result(result.to_dict())
    if measured.signal is not None:
        raise interrupted(
            measured.signal,
            f" after {plural(measured.rounds, 'complete round')}. "
            f"See the measurements: paralab show {folder.path}",
        )
    return result


def _check(configurations: Sequence[Configuration], kind: str, rounds: int | None) -> None:
    if rounds is not None and rounds < 1:
        raise UsageError(
            f"{rounds} is not a valid number of rounds.",
            fix="use at least 1 round, or 3 for a confidence interval",
        )
    workloads = list(dict.fromkeys(each.request.workload for each in configurations))
    if kind == "compare" and len(workloads) > 1:
        raise UsageError(
            f"Different workloads cannot be compared: {', '.join(workloads)}.",
            fix="give --workload once, outside the quotes",
        )


def _combine(before: Outcome, after: Outcome) -> Outcome:
    """Add the rounds of a second measurement of the same configurations. Ignore the second
    measurement if a configuration fails only there."""
    pairs = list(zip(before.configurations, after.configurations, strict=True))
    if any(new.error and not old.error for old, new in pairs):
        return replace_fields(before, interrupted=after.interrupted, signal=after.signal)
    configurations = [replace_fields(old, runs=[*old.runs, *new.runs]) for old, new in pairs]
    return replace_fields(after, configurations=configurations, rounds=before.rounds + after.rounds)


def _plan_rounds(configurations: Sequence[Resolved], rounds: int, first: int = 0) -> list[Planned]:
    """Return the manifest entries. `first` is the number of rounds that have already run."""
    entries = []
    for number, each in enumerate(item.configuration for item in configurations):
        place = f"{number:02d}_{slug(each.label)}"
        runs = [f"{place}/round{first + round_ + 1}" for round_ in range(rounds)]
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
    """Train each configuration in each planned round, in a new random order each time."""
    stopped_by: int | None = None
    failed: dict[int, RunFailed] = {}
    structures = [  # what to verify: a few steps in fp64
        replace(in_fp64(item.configuration.request), steps=VERIFY_STEPS, epochs=None)
        for item in configurations
    ]
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        references = ReferenceRuns(folder.path / "verify", Path(private))
        pairs: dict[Request, ReferencePair] = {}
        for item, request in zip(configurations, structures, strict=True):
            if verify and request not in pairs:  # precisions such as fp32 and bf16 share a pair
                name = f"{len(pairs):02d}_{slug(label(request))}"
                pairs[request] = references.add(name, request, item.machine, item.summary)

        turns = [Turn(training, VERIFYING, VERIFYING) for training in references.trainings]
        turns += _create_runs(folder, configurations, entries, budget_seconds)
        progress = Progress(turns, entries[0].runs, say)
        try:
            failed = train_all(folder, [turn.training for turn in turns], progress.poll)
        except KeyboardInterrupt as error:
            stopped_by = number_of(error)

        verified: dict[int, Verification] = {}
        for number, request in enumerate(structures):
            pair = pairs.get(request)
            if pair and all(n in failed or is_complete(turns[n].training) for n in pair.numbers):
                verified[number] = references.judge(pair, failed)

    errors = {turns[n].number: error.problem for n, error in failed.items()}
    timed = [turn for turn in turns if turn.round != VERIFYING]
    return _conclude(timed, entries, errors, verified, stopped_by, say)


def _create_runs(
    folder: RunFolder,
    configurations: Sequence[Resolved],
    entries: Sequence[Planned],
    budget_seconds: float | None,
) -> list[Turn]:
    turns = []
    for round_ in range(len(entries[0].runs)):
        order = list(range(len(configurations)))
        random.Random(round_).shuffle(order)
        for place, number in enumerate(order):
            item = configurations[number]
            run = RunFolder.create(folder.path / entries[number].runs[round_], "")
            record_plan(run, item.plan, item.machine, item.summary)
            deadline = budget_seconds if round_ >= SURE_ROUNDS and place == 0 else None
            training = Training(item.plan, run, case=str(number), deadline_seconds=deadline)
            turns.append(Turn(training, number, round_))
    return turns


def _conclude(
    timed: Sequence[Turn],
    entries: Sequence[Planned],
    errors: dict[int, str],
    verified: dict[int, Verification],
    stopped_by: int | None,
    say: Print,
) -> Outcome:
    """Compare only the rounds that every configuration finished, ignoring failed configurations."""
    rounds = len(entries[0].runs)
    cut = {
        each.round for each in timed if each.number not in errors and not is_complete(each.training)
    }
    runs: dict[int, list[str]] = {number: [] for number in range(len(entries))}
    for each in timed:
        if each.number not in errors and each.round not in cut:
            finish(each.training.folder)
            runs[each.number].append(entries[each.number].runs[each.round])
        elif not has_started(each.training):
            shutil.rmtree(each.training.folder.path)  # its round ran out of time

    done = rounds - len(cut)
    if cut and stopped_by is None:
        say(
            f"stopped after {done} of {rounds} rounds: the time budget is used up "
            "(--rounds N runs N rounds)"
        )
    stopped = None if done else "it was stopped before its first round was complete"
    configurations = [
        Measured(
            **asdict_fields(replace_fields(entry, runs=runs[number])),
            error=errors.get(number, stopped),
            verify=verified.get(number),
        )
        for number, entry in enumerate(entries)
    ]
    was_stopped = stopped_by is not None
    return Outcome(
        configurations=configurations, rounds=done, interrupted=was_stopped, signal=stopped_by
    )


class Progress:
    """Prints a line when the event files show that a round has begun."""

    def __init__(self, turns: Sequence[Turn], runs: Sequence[str], say: Print) -> None:
        self.turns, self.say = turns, say
        self.first, self.last = (int(runs[end].rpartition("round")[2]) for end in (0, -1))
        self.next = 0
        self.printed: int | None = None

    def poll(self) -> None:
        """Print the round of the newest run. Runs start in order, but some may be skipped."""
        for place in reversed(range(self.next, len(self.turns))):
            turn = self.turns[place]
            if not (turn.training.folder.events / "rank0.jsonl").exists():
                continue
            self.next = place + 1
            if turn.round != self.printed:
                self.printed = turn.round
                verifying = "verifying that all configurations train the same"
                counted = f"round {self.first + turn.round} of {self.last}"
                self.say(verifying if turn.round == VERIFYING else counted)
            return
