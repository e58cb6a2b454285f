"""Why a recorded run failed or hung. The launcher recorded which rank exited first; these checks
find the catalog entry."""

import re

from paralab.analyse.failure import last_lines
from paralab.analyse.hang import find_hang
from paralab.analyse.stack_dumps import StackDump
from paralab.doctor.messages import find_message, named
from paralab.doctor.recorded import Recorded, Run
from paralab.doctor.registry import Finding, Findings, check
from paralab.record.folder import RunFolder

RANK = re.compile(r"Rank (\d+) ")
HUNG = re.compile(r"longer than its deadline")


@check(*("H02 H04 H11 H12 H15 H18 L01 L10 L11 S01 S02 W07".split()), source="run")
def failed_run(recorded: Recorded) -> Findings:
    """Report every failed attempt of a run: those before a restart, and the last one."""
    for run in recorded.runs:
        for failure in run.failures:
            if HUNG.search(failure.problem):
                yield _hang(run, failure.problem, failure.attempt)
            else:
                yield _failure(run, failure.problem)
        if not run.failures and run.result.status == "killed":
            yield _report_killed_run(run)


def _failure(run: Run, problem: str) -> Finding:
    found, known = RANK.search(problem), find_message(problem)
    rank = int(found[1]) if found else None
    log = RunFolder(run.folder).logs / f"rank{rank}.txt"
    lines = tuple(line for line in last_lines(log, 4).splitlines() if line.strip())
    others = [other.rank for other in run.result.ranks if other.rank != rank]
    why = problem.rstrip(".") + "."
    if others:
        why += f" Later errors on {named(others).lower()} are consequences."
    id = known.entry.id if known else "H11"
    fix = known.message.fix.format_map(known.match.groupdict()) if known else ""
    return Finding(id, "error", why, fix, str(run.folder), rank=rank, evidence=lines)


def _hang(run: Run, problem: str, attempt: int) -> Finding:
    """Report a rank that makes no progress, or never reaches the call where the others wait."""
    found, dumps = RANK.search(problem), RunFolder(run.folder).stack_dumps(attempt)
    hang = find_hang(dumps, run.recording.world_size, [int(found[1])] if found else [])
    at = f"rank {hang.rank} is at {hang.where}" if hang.where else None
    evidence = tuple(line for line in (at, hang.waiting) if line)
    where = str(run.folder)
    if hang.kind == "network":
        why = f"{problem} This is certain if the job works with NCCL_P2P_DISABLE=1."
        return Finding("H15", "suspect", why, file=where, evidence=evidence)
    waits = hang.kind == "behind" and StackDump.read(dumps, hang.rank).waits_in
    id = "H04" if hang.mismatch or waits else "W07"  # H04: the rank is in a different collective
    return Finding(id, "error", problem, file=where, rank=hang.rank, evidence=evidence)


def _report_killed_run(run: Run) -> Finding:
    """Report a run in which neither the ranks nor the launcher recorded how it ended."""
    ranks = range(run.recording.world_size)
    silent = [rank for rank in ranks if not run.recording.named("end", rank)]
    why = (
        f"The run stops after {run.result.reached_step} of {run.plan.num_steps} steps, and neither "
        f"{named(silent).lower()} nor the launcher recorded why. Either something killed them "
        "together, or they are still running. The scheduler's log or `dmesg` shows which."
    )
    fix = "Look for a time or memory limit. `paralab run --resume` continues from the last checkpoint."
    return Finding("H12", "suspect", why, fix, str(run.folder))
