"""Several trainings in one launch: the same processes train one after the other, and one that fails
does not take the rest along.

Starting a process that imports torch takes seconds, a short training less. So comparisons and
proofs are lists of jobs; a job that needs fewer ranks than the widest one uses the first few, while
the others wait.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paralab.analyse.failure import root_cause
from paralab.analyse.hang import who_hung
from paralab.analyse.recording import Recording
from paralab.errors import RunFailed
from paralab.launch.local import Ending, launch
from paralab.launch.watchdog import Deadlines, Late
from paralab.machine.host import FULL_BYTES
from paralab.plan.plan import Plan
from paralab.plan.schedules import UNCUT
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.folder import RunFolder


@dataclass(frozen=True)
class TrainingJob:
    """One training: its plan, its own run folder, and what it leaves besides its events.

    case              where one of a case fails, the others of that case are not tried
    deadline_seconds  so long after the launch, neither this job nor any behind it is begun any more
    keeping           the checkpoints it makes, and the one it begins with
    """

    plan: Plan
    folder: RunFolder
    extras: dict[str, str] = field(default_factory=dict)
    case: str = ""
    deadline_seconds: float | None = None
    keeping: CheckpointPolicy | None = None

    def spec(self, deadline_seconds: float | None = None, attempt: int = 0) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "events": str(self.folder.events.resolve()),
            "extras": self.extras,
            "keeping": asdict(self.keeping) if self.keeping else None,
            "deadline_seconds": deadline_seconds,
            "attempt": attempt,
        }

    @property
    def begun(self) -> bool:
        return any(self.folder.events.iterdir())

    @property
    def done(self) -> bool:
        return Recording.read(self.folder.path).status == "completed"


def train_all(
    folder: RunFolder,
    jobs: list[TrainingJob],
    on_poll: Callable[[], None] = lambda: None,
    origin_seconds: float | None = None,
    patience: Deadlines | None = None,
) -> dict[int, RunFailed]:
    """Run the jobs; return the errors of those that failed, by their number. The logs of the ranks
    are in `folder`."""
    failed: dict[int, RunFailed] = {}
    left = list(range(len(jobs)))
    deadlines = [job.deadline_seconds for job in jobs]
    begin = time.perf_counter()
    while left:
        origin = time.perf_counter() if origin_seconds is None else origin_seconds
        late = [
            None if (given := deadlines[number]) is None else begin + given - origin
            for number in left
        ]
        specs = [jobs[number].spec(until) for number, until in zip(left, late, strict=True)]
        ending = launch(folder, specs, origin, on_poll, patience)
        undone = [number for number in left if not jobs[number].done]
        if not ending.failed and not any(jobs[number].begun for number in undone):
            break  # all are done, or the deadline came first
        if not undone:  # all trainings are whole, but a process did not end well
            failed[left[-1]] = failure(jobs[left[-1]], folder, ending)
            break
        failed[undone[0]] = failure(jobs[undone[0]], folder, ending)
        failed |= dict.fromkeys(
            (n for n in undone if _hopeless(jobs[n], jobs[undone[0]], failed[undone[0]])),
            failed[undone[0]],
        )
        left = [number for number in undone if number not in failed]
        for number in undone:  # the deadline of a job that is dropped holds for the next one
            following = next((n for n in left if n > number), None)
            if number in failed and following is not None and deadlines[following] is None:
                deadlines[following] = deadlines[number]
    return failed


def _hopeless(job: TrainingJob, failed: TrainingJob, error: RunFailed) -> bool:
    """Of the same case as the one that failed, or to be compared with what that one should have
    left, or cut into processes at the same places, where the model cannot be cut."""
    reference = failed.extras.get("save_reference")
    cut_alike = job.plan.schedule and (job.plan.workload, job.plan.cuts) == (
        failed.plan.workload,
        failed.plan.cuts,
    )
    return (
        bool(failed.case and job.case == failed.case)
        or bool(reference and job.extras.get("compare_with") == reference)
        or bool(cut_alike and UNCUT in error.problem)
    )


def failure(
    job: TrainingJob,
    launched: RunFolder,
    ending: Ending,
    attempt: int = 0,
    gone: Sequence[int] = (),
) -> RunFailed:
    """The error of a failed training: the root cause first, then where to read more. `gone`: ranks
    whose end nobody saw."""
    if ending.late:
        return _hung(job, launched, ending.late, attempt)
    cause = root_cause(job.folder.path, ending.codes, launched.logs, attempt, gone, ending.words)
    post = ending.posts[cause.rank]
    phases = {"start": "before its first step", "save": f"while saving after {post.step} steps"}
    when = phases.get(post.phase, f"in step {post.step}" if post.step >= 0 else "at its end")
    full = "" if os.strerror(errno.ENOSPC) in cause.what else _full_disk(job)
    return RunFailed(
        f"Rank {cause.rank} failed {when}: {cause.what}{full}",
        detail=cause.detail,
        fix=f"read {cause.log} (the run folder is {job.folder.path})",
    )


def _full_disk(job: TrainingJob) -> str:
    """torch does not say why it could not write a file."""
    paths = [job.folder.path, *([Path(job.keeping.directory)] if job.keeping else [])]
    full = [path for path in paths if path.exists() and shutil.disk_usage(path).free < FULL_BYTES]
    return f" ({os.strerror(errno.ENOSPC)}: {full[0]})" if full else ""


def _hung(job: TrainingJob, launched: RunFolder, late: list[Late], attempt: int) -> RunFailed:
    testimonies = launched.testimonies(attempt)
    hang = who_hung(testimonies, job.plan.world_size, [rank.rank for rank in late])
    first = max(late, key=lambda rank: rank.seconds)
    what = {"start": "The start", "save": f"Saving after {first.step} steps"}.get(
        first.phase, f"Step {first.step}"
    )
    lines = [f"rank {hang.rank} is at {hang.where}" if hang.where else "", hang.waiting or ""]
    longer = (
        f"--{first.phase}-deadline SECONDS if it only needs longer; all stacks are in {testimonies}"
    )
    same = f"let every rank call the same collectives in the same order; all stacks are in {testimonies}"
    return RunFailed(
        f"Rank {hang.rank} {hang.why}: {what[0].lower() + what[1:]} took {first.seconds:.1f} s, longer than its deadline of "
        f"{first.deadline:g} s.",
        detail="\n".join(line for line in lines if line),
        fix=same if hang.mismatch else longer,
    )
