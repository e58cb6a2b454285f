"""Why a recorded run failed or hung. Its launcher has seen the ends of all ranks and named the
first; here that gets its entry."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.analyse.failure import last_lines
from paralab.analyse.hang import find_hang
from paralab.analyse.stack_dumps import StackDump
from paralab.doctor.finding import Finding
from paralab.doctor.recorded import Recorded, Run
from paralab.doctor.registry import check
from paralab.record.folder import RunFolder

RANK = re.compile(r"Rank (\d+) ")
HUNG = re.compile(r"longer than its deadline")

# What the launcher says of the first rank that failed -> entry, and what to do. The first that
# fits.
CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"killed by SIGKILL|is gone without a word|disappeared without an error",
        "H12",
        "Was it the memory? `dmesg | grep -i oom`, the job's memory limit. Then a smaller batch, or fewer loader workers.",
    ),
    (
        r"killed by SIGILL",
        "L10",
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts; `paralab doctor` tries it.",
    ),
    (
        r"killed by SIGBUS|Bus error",
        "L11",
        "A larger /dev/shm (docker run --shm-size=8g, or --ipc=host), or fewer loader workers.",
    ),
    (
        r"EADDRINUSE|address already in use",
        "L01",
        "Another MASTER_PORT; `paralab doctor` names the process that has this one.",
    ),
    (
        r"code 0 (before|without)",
        "H02",
        "Let all ranks leave together: no return, sys.exit or os._exit on one rank only.",
    ),
    (
        r"clients joined|client socket has timed out",
        "H18",
        "The same MASTER_ADDR, MASTER_PORT and WORLD_SIZE on every node.",
    ),
    (
        r"finished reduction in the prior iteration",
        "S01",
        "requires_grad_(False), before DDP, for what the loss does not use; or find_unused_parameters=True.",
    ),
    (
        r"Expected to mark a variable ready only once",
        "S02",
        "checkpoint(use_reentrant=False), or no find_unused_parameters.",
    ),
)


def _failures(recorded: Recorded) -> Iterator[Finding]:
    """The attempt that ended the run, and those that a restart has made good."""
    for run in recorded.runs:
        for failure in run.failures:
            if HUNG.search(failure.problem):
                yield _hang(run, failure.problem, failure.attempt)
            else:
                yield _failure(run, failure.problem)
        if not run.failures and run.result.status == "killed":
            yield _without_a_word(run)


def _failure(run: Run, problem: str) -> Finding:
    found = RANK.search(problem)
    rank = int(found[1]) if found else None
    entry, fix = (
        "H11",
        "Correct what this rank raised; the other ranks' errors are consequences of it.",
    )
    for pattern, id_, words in CAUSES:
        if re.search(pattern, problem):
            entry, fix = id_, words
            break
    log = RunFolder(run.folder).logs / f"rank{rank}.txt"
    lines = tuple(line for line in last_lines(log, 4).splitlines() if line.strip())
    others = [str(r.rank) for r in run.result.ranks if r.rank != rank]
    victims = f" What {_ranks(others)} said after it is no cause." if others else ""
    return Finding(
        entry,
        "error",
        problem.rstrip(".") + "." + victims,
        fix,
        str(run.folder),
        rank=rank,
        evidence=lines,
    )


def _ranks(numbers: list[str]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(numbers)}"


def _hang(run: Run, problem: str, attempt: int) -> Finding:
    """A rank that stands still, or does not come where the others wait for it."""
    found = RANK.search(problem)
    late = [int(found[1])] if found else []
    hang = find_hang(RunFolder(run.folder).stack_dumps(attempt), run.recording.world_size, late)
    evidence = tuple(
        line
        for line in (f"rank {hang.rank} is at {hang.where}" if hang.where else None, hang.waiting)
        if line
    )
    where = str(run.folder)
    if hang.kind == "network":
        fix = "Try NCCL_P2P_DISABLE=1; then the network: firewall, interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)."
        why = f"{problem} Certain if it runs with NCCL_P2P_DISABLE=1."
        return Finding("H15", "suspect", why, fix, where, evidence=evidence)
    stuck = StackDump.read(RunFolder(run.folder).stack_dumps(attempt), hang.rank)
    if hang.mismatch or (
        hang.kind == "behind" and stuck.waits_in
    ):  # in another collective than the others
        fix = "Every rank must call the same collectives in the same order: look at both places."
        return Finding("H04", "error", problem, fix, where, rank=hang.rank, evidence=evidence)
    fix = "Continue it (kill -CONT) if it is stopped; else look at where it is. A longer deadline, if it only needs longer."
    return Finding("W07", "error", problem, fix, where, rank=hang.rank, evidence=evidence)


def _without_a_word(run: Run) -> Finding:
    """No rank and no launcher has written an end."""
    silent = [
        str(rank)
        for rank in range(run.recording.world_size)
        if not run.recording.named("end", rank)
    ]
    done, planned = run.result.reached_step, run.plan.num_steps
    why = (
        f"The run ends after {done} of {planned} steps without a word of {_ranks(silent)} or of the launcher: they were killed "
        "together, or are still running. Certain if the scheduler or `dmesg` says so."
    )
    fix = "`dmesg | grep -i oom`, the job's time and memory limit; `paralab run --resume` goes on from the last checkpoint."
    return Finding("H12", "suspect", why, fix, str(run.folder))


def _rule_of(entry: str) -> None:
    """One rule per entry, so that the table of what is covered knows them all."""

    @check(entry, source="run")
    def failed(recorded: Recorded) -> Iterator[Finding]:
        yield from (finding for finding in _failures(recorded) if finding.id == entry)


for _entry in dict.fromkeys(["H11", "H15", "H04", "W07", *(id_ for _, id_, _ in CAUSES)]):
    _rule_of(_entry)
