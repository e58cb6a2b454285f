"""NCCL's watchdog, interpreted: the rank that is behind, or the network."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.cuda import driver_line
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.said import blamed, tells
from paralab.doctor.logs.watchdog import Dog, dogs, sized
from paralab.units import seconds

RECORD = "TORCH_FR_BUFFER_SIZE=2000 with TORCH_NCCL_DUMP_ON_TIMEOUT=1 keeps the calls of every rank for the next time"


@tells("H10", "H04", "H06", "H07", "H13", "H15")
def collective_timed_out(logs: Logs) -> Iterator[Finding]:
    """Also H04, H06, H07, H13 and H15, which are what a timeout can mean."""
    if blamed(logs).roots or driver_line(logs):
        return  # somebody died of its own; that the others waited for it is no news
    heard = dogs(logs)
    if not any(dog.number is not None for dog in heard):
        return
    groups: dict[str, list[Dog]] = {}
    for dog in heard:
        groups.setdefault(dog.group, []).append(dog)
    group = next(dogs_ for dogs_ in groups.values() if any(dog.number is not None for dog in dogs_))
    yield _interpreted(logs, group, whole=len(groups) == 1)


def _interpreted(logs: Logs, heard: list[Dog], whole: bool) -> Finding:
    timed = [dog for dog in heard if dog.number is not None]
    first = min(timed, key=lambda dog: dog.number or 0)
    evidence = tuple(str(line) for dog in heard for line in dog.lines)[:8]
    met = [dog for dog in timed if dog.number == first.number]
    for dog in met:
        if (dog.operation, dog.values) != (
            first.operation,
            first.values,
        ) and first.operation == dog.operation == "ALLREDUCE":
            return _mismatch("H06", first, dog, evidence)
        if dog.operation != first.operation:
            return _mismatch("H04", first, dog, evidence)
    behind, told = _behind(logs, heard, first.number or 0, whole)
    waited = f"{_ranks([dog for dog in timed if dog.rank != behind])} waited {seconds(first.timeout_ms / 1000)} in {first}"
    if behind is None and told == "all came":
        return Finding(
            "H15",
            "suspect",
            f"{waited}, and all {len(heard)} ranks have enqueued it: nobody is missing, so what lies between them is"
            + (
                " (it is the first collective: P2P between the GPUs does not work)."
                if (first.number or 0) <= 2
                else "."
            )
            + " Certain if it works with NCCL_P2P_DISABLE=1.",
            "try NCCL_P2P_DISABLE=1, then switch off ACS / IOMMU in the BIOS (iommu=pt); between nodes check NCCL_SOCKET_IFNAME "
            "and the links",
            evidence=evidence,
        )
    meaning, id, fix = _meaning(first)
    if len(timed) == 1 and len(heard) == 1 and (id == "H07" or first.values == 1):
        # a rank that waits alone for something else than gradients may have called it alone, and is
        # then the culprit itself
        others = {exit_.rank for exit_ in logs.exits if exit_.code == -6} - {
            timed[0].rank
        }  # they waited too
        lone = len(logs.ranks) > 2 and not others
        behind, told = (timed[0].rank, "is the only one that came to it") if lone else (None, "")
    who = (
        f"Rank {behind} {told}"
        if behind is not None
        else "Which rank is to blame is not in these logs: all ranks' logs would tell"
    )
    counted = any(
        dog.rank == behind for dog in heard
    )  # else it is known by its silence, which a report must confirm
    sure = id == "H10" and behind is not None and len(timed) > 1 and bool(counted or logs.exits)
    return Finding(
        id,
        "error" if sure else "suspect",
        f"{waited}. {who}. {meaning}",
        fix,
        rank=behind,
        evidence=evidence,
    )


def _behind(logs: Logs, heard: list[Dog], number: int, whole: bool) -> tuple[int | None, str]:
    """The rank that has not enqueued the collective which timed out; else the one rank of the job
    whose watchdog had nothing to wait for. A rank that is less far ahead than others has come all
    the same: it is not behind."""
    counted = [dog for dog in heard if dog.enqueued is not None and dog.rank is not None]
    aborted = {
        exit_.rank for exit_ in logs.exits if exit_.code == -6
    }  # by its own watchdog, whose words are not in these logs
    missing = sorted(
        set(logs.ranks) - {dog.rank for dog in heard if dog.rank is not None} - aborted
    )
    late = [dog for dog in counted if (dog.enqueued or 0) < number]
    if len(late) == 1 and not missing:
        most = max(dog.enqueued or 0 for dog in counted)
        return (
            late[0].rank,
            f"had enqueued {late[0].enqueued} of {most} collectives: it is the one that did not come",
        )
    if whole and len(missing) == 1 and missing[0] in logs.heard and not late:
        return missing[0], "has no collective that timed out: it never came to this one"
    if len(counted) > 1 and not late and {dog.rank for dog in heard} >= set(logs.ranks):
        return None, "all came"
    return None, ""


def _meaning(first: Dog) -> tuple[str, str, str]:
    if first.values == 1 and (first.number or 0) <= 2:
        return (
            "One element, and among the first two collectives: a barrier at the start, where the others wait for the one that "
            "prepares the data.",
            "H13",
            "prepare the data before the job; or init_process_group(..., timeout=timedelta(hours=2))",
        )
    if first.operation == "BROADCAST" and (first.number or 0) > 4:
        return (
            "A broadcast in the middle of training is DDP's copy of the buffers at a forward: one rank calls the model alone, "
            "as in an evaluation under `if rank == 0`. Certain with the line where each rank stood.",
            "H07",
            "evaluate on all ranks, or through model.module(...) under the rank condition",
        )
    if first.values == 1:
        return (
            "One element is a barrier or a metric, not a gradient: a collective that not all ranks call.",
            "H10",
            RECORD,
        )
    size = sized(first.values) if first.values else "its size"
    return (
        f"{first.operation} of {size} is a bucket of gradients: the missing rank had no batch left, left the loop, or is slow in "
        "its data."
        if first.operation == "ALLREDUCE"
        else "The missing rank had nothing more to do, left, or hangs in code of its own.",
        "H10",
        f"compare len(loader) of the ranks and what that rank did last; {RECORD}",
    )


def _mismatch(id: str, first: Dog, other: Dog, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        id,
        "error",
        f"At collective {first.number} rank {first.rank} calls {first.operation} of {sized(first.values or 0)} and rank "
        f"{other.rank} {other.operation} of {sized(other.values or 0)}: they meet by their order, so both wait for ever.",
        "the same collectives with the same shapes in the same order on all ranks",
        evidence=evidence,
    )


def _ranks(timed: list[Dog]) -> str:
    ranks = sorted({dog.rank for dog in timed if dog.rank is not None})
    if not ranks:
        return "A rank"
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))}"
