"""Who hung: from what every rank said when the launcher's patience was over, the rank that did not
arrive, and where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paralab.analyse.collective_mismatch import Mismatch, find_mismatch
from paralab.analyse.stack_dumps import Testimony

STATES = {
    "T": "is stopped (SIGSTOP, or Ctrl-Z)",
    "t": "is held by a debugger",
    "D": "waits for a disk that does not answer",
}


@dataclass(frozen=True)
class Hang:
    rank: int
    why: str  # "is stopped …"
    where: str | None
    waiting: str | None  # what the others wait for
    mismatch: Mismatch | None = None


def who_hung(folder: Path, ranks: int, late: Sequence[int]) -> Hang:
    """The rank that is the cause: stopped, or not answering, or behind the others in a collective,
    or not waiting for anybody."""
    said = [Testimony.read(folder, rank) for rank in range(ranks)]
    waiting = _waited_for(said)

    def hang(testimony: Testimony, why: str) -> Hang:
        return Hang(testimony.rank, why, testimony.where, waiting)

    for testimony in said:
        if testimony.state in STATES:
            return hang(testimony, STATES[testimony.state])
    silent = [
        testimony
        for testimony in said
        if testimony.asked and not testimony.answered and testimony.state != "ended"
    ]
    if silent:
        return hang(
            silent[0],
            "does not let go of the Python interpreter: none of its other threads could answer",
        )
    if mismatch := find_mismatch(said):
        one, other = (said[rank] for rank in mismatch.ranks)
        return Hang(one.rank, mismatch.why, one.where, _waiting(other), mismatch)
    behind = _behind(said)
    if behind is not None:
        return hang(said[behind], "did not arrive where the others wait for it")
    if all(testimony.waits_in for testimony in said) and len(said) > 1:
        why = "waits where all ranks have arrived, in the same collective: nobody is missing, so the network is the suspect"
        return hang(said[0], why)
    busy = [
        testimony for testimony in said if testimony.waits_in is None and testimony.rank in late
    ]
    culprit = busy[0] if busy else said[late[0] if late else 0]
    return hang(culprit, "did not come to the end")


def _behind(said: list[Testimony]) -> int | None:
    """The rank that has come to fewer collectives than another one which waits, in the group where
    that one waits."""
    for testimony in said:
        if (wait := testimony.waits_in) and (group := wait.group):
            known = [
                other for other in said if other.arrived(group)
            ]  # of the group: another stage has groups of its own
            others = [
                (other.arrived(group), other.rank)
                for other in known
                if other.rank != testimony.rank
            ]
            if others and min(others)[0] < testimony.arrived(group):
                return min(others)[1]
    return None


def _waited_for(said: list[Testimony]) -> str | None:
    return next((text for testimony in said if (text := _waiting(testimony))), None)


def _waiting(testimony: Testimony) -> str | None:
    wait = testimony.waits_in
    return f"rank {testimony.rank} waits in {wait}, at {testimony.where}" if wait else None
