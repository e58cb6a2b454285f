"""Measure configurations side by side: verify them first, then train them in turns, round after
round, in the same processes.

`compare`, `scale`, `tune`, and `practical` share this. An experiment folder has one run folder per
configuration and round; all results are computed from them.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paralab.analyse.compare import Measured, Outcome
from paralab.analyse.manifest import Planned
from paralab.analyse.verify import Verification
from paralab.errors import RunFailed
from paralab.experiment.configurations import Resolved
from paralab.experiment.planning import record_plan, slug
from paralab.experiment.reference_runs import ReferencePair, ReferenceRuns
from paralab.experiment.run import finish
from paralab.experiment.shared_launch import has_started, is_complete, train_all
from paralab.launch.job import Training
from paralab.machine.signals import number_of
from paralab.plan.label import label
from paralab.plan.request import Request
from paralab.record.folder import RunFolder

VERIFY_STEPS = 3
ROUNDS = 5
SURE_ROUNDS = 3  # always run these; run more only if there is time, unless --rounds is given
BUDGET_SECONDS = 60.0  # for verification and rounds, unless --rounds is given
VERIFYING = -1  # the round number for runs that verify


@dataclass(frozen=True)
class Timed:
    """One measured run: which configuration, in which round."""

    training: Training
    number: int
    round: int


def plan_rounds(configurations: Sequence[Resolved], rounds: int) -> list[Planned]:
    """Return the manifest entries: names, commands, and run folders."""
    entries = []
    for number, item in enumerate(configurations):
        each = item.configuration
        place = f"{number:02d}_{slug(each.label)}"
        entries.append(
            Planned(
                name=each.label,
                command=each.command,
                request=each.request,
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
    """Train each configuration in each planned round, in a new random order each time."""
    stopped_by: int | None = None
    failed: dict[int, RunFailed] = {}
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        references = ReferenceRuns(folder.path / "proof", Path(private))
        pairs = _add_references(references, configurations) if prove else {}
        timed = _create_runs(folder, configurations, entries, budget_seconds)
        trainings = [*references.trainings, *(each.training for each in timed)]
        rounds = [VERIFYING] * len(references.trainings) + [each.round for each in timed]
        progress = Progress(trainings, rounds, len(entries[0].runs), say)
        try:
            failed = train_all(folder, trainings, progress.poll)
        except KeyboardInterrupt as error:
            stopped_by = number_of(error)

        verified: dict[int, Verification] = {}
        for number, item in enumerate(configurations):
            pair = pairs.get(_structure(item))
            if pair and all(n in failed or is_complete(trainings[n]) for n in pair.numbers):
                verified[number] = references.judge(pair, failed)

    first = len(references.trainings)
    errors = {timed[n - first].number: error.problem for n, error in failed.items() if n >= first}
    return _conclude(timed, entries, errors, verified, stopped_by, say)


def _create_runs(
    folder: RunFolder,
    configurations: Sequence[Resolved],
    entries: Sequence[Planned],
    budget_seconds: float | None,
) -> list[Timed]:
    timed = []
    for round_ in range(len(entries[0].runs)):
        order = list(range(len(configurations)))
        random.Random(round_).shuffle(order)
        for place, number in enumerate(order):
            item = configurations[number]
            run = RunFolder.create(folder.path / entries[number].runs[round_], "")
            record_plan(run, item.plan, item.machine, item.summary)
            deadline = budget_seconds if round_ >= SURE_ROUNDS and place == 0 else None
            training = Training(item.plan, run, case=str(number), deadline_seconds=deadline)
            timed.append(Timed(training, number, round_))
    return timed


def _conclude(
    timed: Sequence[Timed],
    entries: Sequence[Planned],
    errors: dict[int, str],
    verified: dict[int, Verification],
    stopped_by: int | None,
    say: Callable[[str], None],
) -> Outcome:
    """Compare only complete rounds, which every configuration that did not fail has finished."""
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
            name=entry.name,
            command=entry.command,
            request=entry.request,
            runs=runs[number],
            error=errors.get(number, stopped),
            verify=verified.get(number),
        )
        for number, entry in enumerate(entries)
    ]
    return Outcome(
        configurations=configurations,
        rounds=done,
        interrupted=stopped_by is not None,
        signal=stopped_by,
    )


class Progress:
    """Prints when a round begins, as its runs' event files show."""

    def __init__(
        self,
        trainings: Sequence[Training],
        rounds: Sequence[int],
        num_rounds: int,
        say: Callable[[str], None],
    ) -> None:
        self.trainings, self.rounds, self.num_rounds, self.say = trainings, rounds, num_rounds, say
        self.next = 0
        self.printed: int | None = None

    def poll(self) -> None:
        """Print the newest run's round. Runs start in order, but some may be skipped."""
        for number in range(len(self.trainings) - 1, self.next - 1, -1):
            if (self.trainings[number].folder.events / "rank0.jsonl").exists():
                self.next = number + 1
                self._print(self.rounds[number])
                return

    def _print(self, round_: int) -> None:
        if round_ == self.printed:
            return
        self.printed = round_
        verifying = "verifying that all configurations train alike"
        self.say(verifying if round_ == VERIFYING else f"round {round_ + 1} of {self.num_rounds}")


def _structure(item: Resolved) -> Request:
    """Return the configuration to verify: in fp64, where rounding cannot mask an error."""
    return replace(
        item.configuration.request,
        precision="fp64",
        loss_scale=None,
        no_scaler=None,
        steps=VERIFY_STEPS,
        epochs=None,
    )


def _add_references(
    references: ReferenceRuns, configurations: Sequence[Resolved]
) -> dict[Request, ReferencePair]:
    """Add one pair per structure: fp32 and bf16 versions of a configuration share it."""
    pairs: dict[Request, ReferencePair] = {}
    for item in configurations:
        request = _structure(item)
        if request not in pairs:
            name = f"{len(pairs):02d}_{slug(label(request))}"
            pairs[request] = references.add(name, request, item.machine, item.summary)
    return pairs
