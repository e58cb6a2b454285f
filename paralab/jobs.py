"""Several trainings in one launch: the same processes train one after the other, and one that fails does not take the rest along.

Starting a process that imports torch takes seconds, a short training less. So comparisons and proofs are lists of jobs; a job that
needs fewer ranks than the widest one uses the first few, while the others wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paralab.analyse.failure import root_cause
from paralab.analyse.recording import Recording
from paralab.errors import RunFailed
from paralab.launch.local import launch
from paralab.plan.plan import Plan
from paralab.record.folder import RunFolder


@dataclass(frozen=True)
class Job:
    """One training: its plan, its own run folder, and what it leaves besides its events.

    case              where one of a case fails, the others of that case are not tried
    deadline_seconds  so long after the launch, neither this job nor any behind it is begun any more
    """

    plan: Plan
    folder: RunFolder
    extras: dict[str, str] = field(default_factory=dict)
    case: str = ""
    deadline_seconds: float | None = None

    def spec(self) -> dict[str, Any]:
        return {"plan": self.plan.to_json(), "events": str(self.folder.events.resolve()), "extras": self.extras}

    @property
    def begun(self) -> bool:
        return any(self.folder.events.iterdir())

    @property
    def done(self) -> bool:
        return Recording.read(self.folder.path).status == "completed"


def train_all(
    folder: RunFolder, jobs: list[Job], on_poll: Callable[[], None] = lambda: None, origin_seconds: float | None = None
) -> dict[int, RunFailed]:
    """Run the jobs; return the errors of those that failed, by their number. The logs of the ranks are in `folder`."""
    failed: dict[int, RunFailed] = {}
    left = list(range(len(jobs)))
    deadlines = [job.deadline_seconds for job in jobs]
    begin = time.perf_counter()
    while left:
        origin = time.perf_counter() if origin_seconds is None else origin_seconds
        late = [None if (given := deadlines[number]) is None else begin + given - origin for number in left]
        specs = [jobs[number].spec() | {"deadline_seconds": until} for number, until in zip(left, late, strict=True)]
        codes = launch(folder, specs, origin, on_poll)
        undone = [number for number in left if not jobs[number].done]
        if not any(codes) and not any(jobs[number].begun for number in undone):
            break  # all are done, or the deadline came first
        if not undone:  # all trainings are whole, but a process did not end well
            failed[left[-1]] = failure(jobs[left[-1]], folder, codes)
            break
        failed[undone[0]] = failure(jobs[undone[0]], folder, codes)
        failed |= dict.fromkeys((n for n in undone if _hopeless(jobs[n], jobs[undone[0]])), failed[undone[0]])
        left = [number for number in undone if number not in failed]
        for number in undone:  # the deadline of a job that is dropped holds for the next one
            following = next((n for n in left if n > number), None)
            if number in failed and following is not None and deadlines[following] is None:
                deadlines[following] = deadlines[number]
    return failed


def _hopeless(job: Job, failed: Job) -> bool:
    """Of the same case as the one that failed, or to be compared with what that one should have left."""
    reference = failed.extras.get("save_reference")
    return bool(failed.case and job.case == failed.case) or bool(reference and job.extras.get("compare_with") == reference)


def failure(job: Job, launched: RunFolder, codes: list[int | None], gone: Sequence[int] = ()) -> RunFailed:
    """The error of a failed training: the root cause first, then where to read more."""
    cause = root_cause(job.folder.path, codes, launched.logs, gone)
    when = "before its first step" if cause.step is None else f"after step {cause.step}"
    return RunFailed(
        f"Rank {cause.rank} failed {when}: {cause.what}",
        detail=cause.detail,
        cure=f"read {cause.log} (the run folder is {job.folder.path})",
    )
