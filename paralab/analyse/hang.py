"""Find which rank hangs, why, and where, using the stack dumps from all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paralab.analyse import collective_matching as matching
from paralab.analyse.collective_matching import CollectiveCall, Mismatch
from paralab.analyse.stack_dumps import STOPPED, StackDump


@dataclass(frozen=True)
class Hang:
    """A hang. `kind` is stopped, blocked (the GIL), mismatch, behind, network, or slow."""

    kind: str
    rank: int
    why: str  # what the rank does: "is stopped …"
    where: str | None
    waiting: str | None  # the collective in which the others wait
    mismatch: Mismatch | None = None


def find_hang(folder: Path, ranks: int, late: Sequence[int]) -> Hang:
    """Return the rank that causes the hang. `late` lists the ranks that exceeded their deadline."""
    dumps = [StackDump.read(folder, rank) for rank in range(ranks)]
    waiting = next(filter(None, map(_waiting, dumps)), None)

    def hang(kind: str, dump: StackDump, why: str) -> Hang:
        return Hang(kind, dump.rank, why, dump.where, waiting)

    for dump in dumps:
        if dump.state in STOPPED:
            return hang("stopped", dump, STOPPED[dump.state])
    for dump in dumps:
        if dump.asked and not dump.answered and dump.state != "ended":
            return hang("blocked", dump, "holds the GIL, so its other threads could not respond")

    calls = {dump.rank: dump.calls for dump in dumps if dump.answered}
    mismatches = [
        mismatch
        for mismatch in matching.find_mismatches(calls, differ=_differ)
        # A stack does not show the group, so more than two ranks may be in different groups.
        if mismatch.number is not None or mismatch.kind == "groups" or len(dumps) == 2
    ]
    for mismatch in mismatches:
        if mismatch.kind != "behind":
            rank, other = mismatch.pair
            why = _why(mismatch, dumps)
            return Hang("mismatch", rank, why, dumps[rank].where, _waiting(dumps[other]), mismatch)
    for mismatch in mismatches:
        behind = dumps[mismatch.behind[0]]
        return hang("behind", behind, "did not reach the collective in which the other ranks wait")
    if all(dump.waits_in for dump in dumps) and len(dumps) > 1:
        why = "waits in a collective that all ranks have reached: the network is the likely cause"
        return hang("network", dumps[0], why)

    busy = [dump for dump in dumps if dump.waits_in is None and dump.rank in late]
    culprit = busy[0] if busy else dumps[late[0] if late else 0]
    return hang("slow", culprit, "did not finish")


def _differ(one: CollectiveCall, other: CollectiveCall) -> matching.Difference | None:
    """Compare two open calls. For these, the stacks show more than the Flight Recorder."""
    if not (one.is_open or other.is_open):
        return None
    if difference := matching.differ(one, other):
        return difference
    differ = None not in (one.record, other.record) and one.record != other.record
    return "operation" if differ else None


def _why(mismatch: Mismatch, dumps: Sequence[StackDump]) -> str:
    one, other = mismatch.pair
    mine, its = _name(mismatch.calls[one]), _name(mismatch.calls[other])
    elsewhere = ""
    if mine == its:
        lines = "  on a different line" if dumps[one].where != dumps[other].where else ""
        elsewhere = "  in a different group" if mismatch.kind == "groups" else lines
    return f"calls {mine} where rank {other} calls {its}{elsewhere}, and both wait forever"


def _waiting(dump: StackDump) -> str | None:
    call = dump.calls[-1] if dump.waits_in else None
    return f"rank {dump.rank} waits in {_name(call)}, at {dump.where}" if call else None


def _name(call: CollectiveCall | None) -> str:
    """Name a call by the kind shown on the stack, if the stack shows one."""
    assert call is not None
    return str(call).replace(call.kind or "", call.record or call.kind or "", 1)
