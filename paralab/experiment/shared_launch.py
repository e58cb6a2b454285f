"""Perform multiple runs in one launch: the same processes perform one run after another, and a
failed run does not affect the others.

Starting a process that imports torch takes seconds, which is longer than a short run. A run that
needs fewer ranks than the largest run uses only the first ranks, while the others wait.
"""

import time
from collections.abc import Callable

from paralab.analyse.recording import Recording
from paralab.errors import RunFailed
from paralab.experiment.explain_failure import explain_failure
from paralab.launch.job import Outcome, Training
from paralab.launch.ranks import RankExits, run_ranks
from paralab.launch.run_options import Deadlines
from paralab.plan.schedules import UNCUT
from paralab.record.folder import RunFolder


def has_started(training: Training) -> bool:
    return any(training.folder.events.iterdir())


def is_complete(training: Training) -> bool:
    return Recording.read(training.folder.path).status == "completed"


def train_all(
    folder: RunFolder,
    trainings: list[Training],
    on_poll: Callable[[], None] = lambda: None,
    deadlines: Deadlines | None = None,
) -> dict[int, RunFailed]:
    """Perform the runs, with logs in `folder`. Return the errors by run number."""
    failed: dict[int, RunFailed] = {}
    left = list(range(len(trainings)))
    limits = [training.deadline_seconds for training in trainings]
    begin = time.perf_counter()
    while left:
        origin = time.perf_counter()
        specs = []
        for number in left:
            limit = limits[number]
            deadline = None if limit is None else begin + limit - origin
            specs.append(trainings[number].to_spec(deadline))
        exits = run_ranks(folder, specs, origin, lambda board: on_poll(), deadlines)

        undone = [number for number in left if not is_complete(trainings[number])]
        if not exits.failed and not any(has_started(trainings[number]) for number in undone):
            break  # all runs are complete, or the deadline passed first
        if not undone:  # all runs are complete, but a process did not exit properly
            failed[left[-1]] = _explain(trainings[left[-1]], folder, exits)
            break

        first = undone[0]
        error = _explain(trainings[first], folder, exits)
        skipped = [n for n in undone if _depends_on(trainings[n], trainings[first], error)]
        failed |= dict.fromkeys([first, *skipped], error)
        left = [number for number in undone if number not in failed]
        _hand_on_deadlines(limits, undone, left)
    return failed


def _explain(training: Training, folder: RunFolder, exits: RankExits) -> RunFailed:
    return explain_failure(Outcome(training.folder, "failed", training, exits), folder)


def _hand_on_deadlines(limits: list[float | None], undone: list[int], left: list[int]) -> None:
    """Give the deadline of a dropped run to the next run, if that run has none."""
    for number in undone:
        following = next((n for n in left if n > number), None)
        if number not in left and following is not None and limits[following] is None:
            limits[following] = limits[number]


def _depends_on(training: Training, failed: Training, error: RunFailed) -> bool:
    """Return whether a run must fail too: it has the same case, the same reference, or the same
    impossible cuts."""
    reference = failed.extras.get("save_reference")
    same_case = failed.case != "" and training.case == failed.case
    compared = reference is not None and training.extras.get("compare_with") == reference
    cuts, bad_cuts = ((plan.workload, plan.cuts) for plan in (training.plan, failed.plan))
    same_cuts = training.plan.schedule is not None and cuts == bad_cuts
    return same_case or compared or (same_cuts and UNCUT in error.problem)
