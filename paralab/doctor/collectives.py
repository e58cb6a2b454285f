"""Do the ranks call the same collectives in the same order? A pure comparison of plain lists, as
recorders' dumps give them.

Collectives meet by their number in their group, never by name: the third call of rank 0 meets the
third call of rank 1.

    number       1              2              3
    rank 0   all_reduce(4)  all_reduce(1)  broadcast(8)
    rank 1   all_reduce(4)  all_reduce(1)                  -> rank 1 is behind: it did not come to number 3
    rank 1   all_reduce(4)  broadcast(8)                   -> number 2 meets another operation
    rank 1   all_reduce(4)  all_reduce(7)                  -> number 2 meets another size
    rank 1   all_reduce(4)  all_reduce(1) from elsewhere   -> number 2 meets another call site: quietly wrong numbers
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Kind = Literal["behind", "operation", "size", "site", "stuck"]
LIBRARIES = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "<frozen",
    "<string>",
    "torch/distributed",
    "torch/nn",
    "/paralab/observe/",
)
# Where each rank gives and gets the same. A broadcast may well stand in two branches, one for the
# root and one for the rest.
SYMMETRIC = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter")
WINDOW = 32  # collectives in which a changed order is looked for
# Operations whose ranks bring different sizes on purpose; scatter's and gather's sizes differ
# between the root and the rest.
UNEVEN = ("scatter", "gather", "all_to_all", "alltoall", "coalesced", "send", "recv")


@dataclass(frozen=True)
class Collective:
    """One call on one rank. `site`: "train.py:12" of the user's code, None if it was not
    recorded."""

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...] = ()
    site: str | None = None
    done: bool = False

    @property
    def values(self) -> int:
        return sum(prod(size) for size in self.sizes)

    def __str__(self) -> str:
        where = f" at {self.site}" if self.site else ""
        return (
            f"{self.operation} of {self.values:,} values{where}"
            if self.sizes
            else f"{self.operation}{where}"
        )


@dataclass(frozen=True)
class Mismatch:
    """The first place in a group where the ranks part. `rank` is the one that differs from all
    others: None with two ranks, of which either may be the wrong one. "stuck": all ranks are in the
    same collective and it does not end."""

    kind: Kind
    group: str
    number: int
    calls: tuple[
        tuple[int, Collective | None], ...
    ]  # of every rank that was heard; None: it did not come
    rank: int | None = None
    last: Collective | None = None  # the last thing that the missing rank did
    swapped: bool = False  # "site": each rank calls the other's line soon after, so two collectives have changed places

    @property
    def waiting(self) -> list[tuple[int, Collective]]:
        return [(rank, call) for rank, call in self.calls if call is not None]


def mismatches(
    by_rank: Mapping[int, Iterable[Collective]], *, over: bool = False
) -> list[Mismatch]:
    """The first mismatch of every group, the earliest number first. `over`: the ranks have ended,
    so a rank that is one collective behind will not come any more; while they run, being behind
    counts only where another rank waits."""
    groups: dict[str, dict[int, dict[int, Collective]]] = defaultdict(dict)
    for rank, calls in by_rank.items():
        for call in calls:
            groups[call.group].setdefault(rank, {})[call.number] = call
    found = [_first(group, ranks, over) for group, ranks in groups.items()]
    return sorted(
        (mismatch for mismatch in found if mismatch),
        key=lambda mismatch: (mismatch.number, mismatch.group),
    )


def _first(
    group: str, ranks: Mapping[int, Mapping[int, Collective]], over: bool
) -> Mismatch | None:
    if len(ranks) < 2:
        return None
    last = {rank: max(calls) for rank, calls in ranks.items()}
    start = max(min(calls) for calls in ranks.values())  # a recorder forgets the oldest
    for number in range(start, min(last.values()) + 1):
        calls = {rank: held[number] for rank, held in ranks.items() if number in held}
        if len(calls) > 1 and (kind := _differ(calls)):
            swapped = kind == "site" and _swapped(calls, ranks)
            return Mismatch(
                kind,
                group,
                number,
                tuple(sorted(calls.items())),
                _odd_one(calls, kind),
                swapped=swapped,
            )
    lowest = min(last.values())
    behind = [rank for rank in last if last[rank] == lowest]
    if len(behind) < len(last):
        number = lowest + 1
        open_ = [rank for rank, held in ranks.items() if number in held and not held[number].done]
        if not over and not open_:
            return None
        came = tuple((rank, ranks[rank].get(number)) for rank in sorted(ranks))
        return Mismatch(
            "behind",
            group,
            number,
            came,
            behind[0] if len(behind) == 1 else None,
            ranks[behind[0]][lowest],
        )
    ends = {rank: held[lowest] for rank, held in ranks.items()}
    if over and not any(call.done for call in ends.values()):
        return Mismatch("stuck", group, lowest, tuple(sorted(ends.items())))
    return None


def _differ(calls: Mapping[int, Collective]) -> Kind | None:
    values = list(calls.values())
    if len({call.operation for call in values}) > 1:
        return "operation"
    if len({call.sizes for call in values}) > 1 and not any(
        part in values[0].operation for part in UNEVEN
    ):
        return "size"
    if (
        any(part in values[0].operation for part in SYMMETRIC)
        and None not in (sites := {call.site for call in values})
        and len(sites) > 1
    ):
        return "site"
    return None


def _swapped(
    calls: Mapping[int, Collective], ranks: Mapping[int, Mapping[int, Collective]]
) -> bool:
    """The ranks that differ here go on to make the same calls in another order."""
    follow = {
        rank: [ranks[rank][n].site for n in sorted(ranks[rank]) if n >= call.number]
        for rank, call in calls.items()
    }
    first, *others = follow.values()
    return all(changed_places(first, other) for other in others if other[0] != first[0])


def changed_places(mine: Sequence[Hashable], its: Sequence[Hashable]) -> int:
    """How many calls two ranks make in another order, from one on that differs: a b c | c a b -> 3;
    0 if they are not the same calls. Used for live ranks, too, which know more of each call than
    its line."""
    for size in range(2, min(WINDOW, len(mine), len(its)) + 1):
        if Counter(mine[:size]) == Counter(its[:size]):
            return size
    return 0


def _odd_one(calls: Mapping[int, Collective], kind: Kind) -> int | None:
    """The one rank that differs, where all others agree: the majority is right. Nobody, if two
    ranks stand against each other."""
    said = {
        rank: (
            call.operation if kind == "operation" else call.sizes if kind == "size" else call.site
        )
        for rank, call in calls.items()
    }
    counted = Counter(said.values())
    odd = [rank for rank, value in said.items() if counted[value] == 1]
    return odd[0] if len(odd) == 1 and len(calls) > 2 and len(counted) == 2 else None


def from_recorder(entries: Sequence[Mapping[str, Any]]) -> list[Collective]:
    """Flight Recorder entries (gloo and NCCL, JSON and pickle) as plain collectives. Point-to-point
    calls are left out: they have a numbering of their own, and their two ends differ by nature."""
    calls = []
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        group = entry.get("process_group") or [entry.get("pg_id", 0)]
        name = str(entry.get("profiling_name", "?")).split(":")[-1]
        sizes = tuple(tuple(int(n) for n in size) for size in entry.get("input_sizes") or ())
        done = bool(entry.get("retired")) or entry.get("state") == "completed"
        calls.append(
            Collective(
                str(group[0]),
                int(entry.get("collective_seq_id", 0)),
                name,
                sizes,
                site(entry.get("frames")),
                done,
            )
        )
    return calls


def site(frames: Sequence[Mapping[str, Any]] | None) -> str | None:
    """The innermost frame of the user's own code. Recorders write the innermost frame first."""
    for frame in frames or ():
        file = str(frame.get("filename", frame.get("file", "")))
        if file and not any(part in file for part in LIBRARIES) and file.endswith(".py"):
            return f"{file}:{frame.get('line')}"
    return None
