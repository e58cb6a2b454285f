"""Find which rank hangs, why, and where, using the stack dumps from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paralab.analyse.collective_mismatch import Mismatch, find_mismatch
from paralab.analyse.stack_dumps import StackDump

STATES = {
    "T": "is stopped (SIGSTOP or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "D": "is waiting for a disk that does not respond",
}


@dataclass(frozen=True)
class Hang:
    """The cause of a hang. `kind` is stopped, blocked (the interpreter), mismatch, behind, network,
    or slow."""

    kind: str
    rank: int
    why: str  # "is stopped …"
    where: str | None
    waiting: str | None  # the collective that the others wait in
    mismatch: Mismatch | None = None


def find_hang(folder: Path, ranks: int, late: Sequence[int]) -> Hang:
    """Return the rank that causes the hang. `late` lists the ranks that exceeded their deadline."""
    dumps = [StackDump.read(folder, rank) for rank in range(ranks)]
    waiting = next((text for dump in dumps if (text := _waiting(dump))), None)

    def hang(kind: str, dump: StackDump, why: str) -> Hang:
        return Hang(kind, dump.rank, why, dump.where, waiting)

    for dump in dumps:
        if dump.state in STATES:
            return hang("stopped", dump, STATES[dump.state])
    for dump in dumps:
        if dump.asked and not dump.answered and dump.state != "ended":
            why = "holds the Python interpreter: none of its other threads could respond"
            return hang("blocked", dump, why)

    if mismatch := find_mismatch(dumps):
        one, other = (dumps[rank] for rank in mismatch.ranks)
        return Hang("mismatch", one.rank, mismatch.why, one.where, _waiting(other), mismatch)
    behind = _find_behind(dumps)
    if behind is not None:
        return hang("behind", dumps[behind], "did not arrive where the other ranks wait for it")
    if all(dump.waits_in for dump in dumps) and len(dumps) > 1:
        why = (
            "waits in a collective that all ranks have reached, so the network is the likely cause"
        )
        return hang("network", dumps[0], why)

    busy = [dump for dump in dumps if dump.waits_in is None and dump.rank in late]
    culprit = busy[0] if busy else dumps[late[0] if late else 0]
    return hang("slow", culprit, "did not finish")


def _find_behind(dumps: list[StackDump]) -> int | None:
    """Return a rank that is behind: it has reached fewer collectives in a group than a rank that
    waits in that group."""
    for dump in dumps:
        wait = dump.waits_in
        if wait is None or wait.group is None:
            continue
        # Compare only ranks in this group, because other stages have other groups.
        reached = [
            (other.arrived(wait.group), other.rank)
            for other in dumps
            if other.rank != dump.rank and other.arrived(wait.group)
        ]
        if reached and min(reached)[0] < dump.arrived(wait.group):
            return min(reached)[1]
    return None


def _waiting(dump: StackDump) -> str | None:
    wait = dump.waits_in
    return f"rank {dump.rank} waits in {wait}, at {dump.where}" if wait else None
