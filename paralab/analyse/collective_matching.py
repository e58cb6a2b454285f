"""Match the collectives of all ranks to find where they first differ and which rank is behind.

We match collectives by their sequence number in a process group, never by name or line. The third
call on rank 0 belongs to the third call on rank 1.

    group 0    number 1        number 2        number 3
    rank 0     all_reduce(4)   all_reduce(1)   broadcast(8), waits

    rank 1     all_reduce(4)   all_reduce(1)                      behind: it never called number 3
    rank 1     all_reduce(4)   broadcast(8)                       number 2 is a different operation
    rank 1     all_reduce(4)   all_reduce(7)                      number 2 has a different size
    rank 1     all_reduce(4)   all_reduce(1) on another line wrong sums, and no error

Calls come from the launcher, watched and attached ranks, Flight Recorder dumps, watchdog lines, and
run folders. Each source converts its calls to `CollectiveCall` and calls `find_mismatches`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any, Literal

DEFAULT_GROUP = "0"  # the group of all ranks
# Matches the names of collectives in torch.distributed and in the Flight Recorder.
KIND = re.compile(
    r"_?(?:monitored_)?i?(reduce_scatter|all_?reduce|all_?gather|all_?to_?all|broadcast|barrier"
    r"|scatter|gather|reduce|send|recv)"
    r"(?:_into)?(?:_(?:tensor|single|object|list|base|coalesced|uneven|internal))*",
    re.IGNORECASE,
)
# In these collectives, each rank contributes the same number of values.
SAME_SIZE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
# In other collectives, the root may call from a different line.
SAME_LINE = ("all_reduce", "all_gather", "reduce_scatter")
POINT_TO_POINT = ("send", "recv")
FROM = ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "recv")
WINDOW = 32  # how many calls to search for a changed order

Difference = Literal["operation", "size", "site"]


@dataclass(frozen=True)
class CollectiveCall:
    """One call on one rank. An unknown property is None."""

    kind: str | None  # a value that `kind_of` returns
    group: str | None = DEFAULT_GROUP
    number: int | None = None  # the sequence number in the group; None for send and recv
    shapes: tuple[tuple[int, ...], ...] | None = None  # one per tensor from this rank
    dtype: str | None = None
    site: Hashable = None  # an id for the calling line; None if lines may differ
    where: str | None = None  # the calling line, for messages
    is_open: bool = False  # True if the call has not returned
    peer: int | None = None  # the root, or the other rank of a send or receive
    record: Any = field(default=None, compare=False)  # the source's own record of this call

    @property
    def values(self) -> int | None:
        return None if self.shapes is None else sum(prod(shape) for shape in self.shapes)

    def __str__(self) -> str:
        kind = self.kind or "a collective"
        if self.peer is not None:
            kind += f" {'from' if kind.endswith(FROM) else 'to'} rank {self.peer}"
        if not self.shapes or self.values is None:
            return kind
        return f"{kind} of {self.values:,} value{'' if self.values == 1 else 's'}"


@dataclass(frozen=True)
class Mismatch:
    """A place where the ranks in a group differ.

    kind    operation, size, site: calls with the same number differ in this way
            behind: at least one rank waits in `number`, which the ranks in `behind` never called
            groups: each of two ranks waits in a group where the other is missing
            stuck: all ranks are in the same collective, which never finishes
    """

    kind: Difference | Literal["behind", "groups", "stuck"]
    group: str | None
    number: int | None
    calls: Mapping[int, CollectiveCall | None]  # rank -> its call with this number, if known
    odd: int | None = None  # the only rank that differs; None with two ranks (either may be wrong)
    behind: tuple[int, ...] = ()
    # the last call of the ranks that are behind
    last: Mapping[int, CollectiveCall | None] = field(default_factory=dict)
    swapped: bool = (
        False  # for kind `site`: True if the ranks make the same calls in a different order
    )

    @property
    def came(self) -> list[tuple[int, CollectiveCall]]:
        return [(rank, call) for rank, call in self.calls.items() if call is not None]

    @property
    def pair(self) -> tuple[int, int]:
        """Two ranks that differ, with the odd rank first."""
        ranks = [rank for rank, _ in self.came]
        one = ranks[0] if self.odd is None else self.odd
        others = [rank for rank in ranks if rank != one]
        mine = self.calls[one]
        assert mine is not None
        differing = [r for r in others if (its := self.calls[r]) is not None and differ(mine, its)]
        return one, (differing or others)[0]


Differ = Callable[[CollectiveCall, CollectiveCall], Difference | None]
Numbered = Mapping[int, Mapping[int, CollectiveCall]]  # rank -> number -> call


def kind_of(name: str) -> str | None:
    """Return `all_gather` for `_all_gather_base`, `all_gather_into_tensor`, and `allgather`."""
    match = KIND.fullmatch(name.partition(" ")[0])
    if not match:
        return None
    return re.sub(r"^all_?(to)?_?", lambda all_: "all_to_" if all_[1] else "all_", match[1].lower())


def differ(one: CollectiveCall, other: CollectiveCall) -> Difference | None:
    """Compare two calls with the same number. An unknown property never differs."""
    if one.kind is None or other.kind is None:
        return None
    if one.kind != other.kind or (None not in (one.peer, other.peer) and one.peer != other.peer):
        return "operation"
    if kind_of(one.kind) in SAME_SIZE and None not in (one.values, other.values):
        if one.values != other.values:
            return "size"
        if None not in (one.dtype, other.dtype) and one.dtype != other.dtype:
            return "size"
    if None not in (one.site, other.site) and one.site != other.site:
        return "site"
    return None


def find_mismatches(
    ranks: Mapping[int, Iterable[CollectiveCall]],
    *,
    members: Mapping[str, Collection[int]] | None = None,
    over: bool = False,
    differ: Differ = differ,
) -> list[Mismatch]:
    """Return the first difference and the ranks that are behind, in each group.

    `ranks` maps each rank to its calls, if they are known. `members` lists the ranks in each
    group; by default, these are the ranks with a call in the group. While the ranks run, a rank is
    behind only if another rank waits for it. `over` is True if all ranks have exited, so a rank
    that is behind will never arrive."""
    calls = {rank: list(own) for rank, own in ranks.items()}
    groups: dict[str, dict[int, dict[int, CollectiveCall]]] = defaultdict(dict)
    for rank, own in calls.items():
        for call in own:
            if call.group is not None and call.number is not None:
                known = groups[call.group].setdefault(rank, {})
                if call.kind is not None or call.number not in known:
                    known[call.number] = call
    mismatches: list[Mismatch] = []
    for group, numbered in groups.items():
        for rank in calls if group == DEFAULT_GROUP else (members or {}).get(group, ()):
            if rank in calls and (members is None or rank in members.get(group, calls)):
                numbered.setdefault(rank, {})
        if len(numbered) > 1:
            mismatches += [*_difference(group, numbered, differ), *_behind(group, numbered, over)]
    mismatches.sort(key=lambda mismatch: (mismatch.number or 0, mismatch.group or ""))
    return [*_across_groups(mismatches), *mismatches, *_without_numbers(calls, differ)]


def _difference(group: str, ranks: Numbered, differ: Differ) -> Iterator[Mismatch]:
    """Yield the first sequence number at which two ranks make different calls."""
    counted = Counter(number for own in ranks.values() for number in own)
    for number in sorted(number for number, times in counted.items() if times > 1):
        calls = {rank: own[number] for rank, own in sorted(ranks.items()) if number in own}
        known = next((call for call in calls.values() if call.kind is not None), None)
        if known is None or not any(differ(known, call) for call in calls.values()):
            continue
        pairs = [
            (one, other, kind)
            for one, other in combinations(calls, 2)
            if (kind := differ(calls[one], calls[other]))
        ]
        kind = pairs[0][2]
        times = Counter(rank for one, other, _ in pairs for rank in (one, other))
        odd = [rank for rank in calls if times[rank] == len(calls) - 1]
        sites = {
            rank: [own[n].site for n in sorted(own) if n >= number] for rank, own in ranks.items()
        }
        swapped = all(changed_places(sites[one], sites[other]) for one, other, _ in pairs)
        alone = odd[0] if len(odd) == 1 and len(calls) > 2 else None
        yield Mismatch(kind, group, number, calls, alone, swapped=kind == "site" and swapped)
        return


def _behind(group: str, ranks: Numbered, over: bool) -> Iterator[Mismatch]:
    """Yield the first number that one rank waits in (or, if `over`, has called) but another rank
    never called. If there is none, yield the number of a collective in which all are stuck."""
    last = {rank: max(own, default=-1) for rank, own in ranks.items()}
    lowest, highest = min(last.values()), max(last.values())
    waited_in = [
        n for own in ranks.values() for n, call in own.items() if call.is_open and n > lowest
    ]
    if waited_in or (over and lowest < highest):
        number = min(waited_in, default=lowest + 1)
        behind = tuple(rank for rank in sorted(last) if last[rank] < number)
        yield Mismatch(
            "behind",
            group,
            number,
            {rank: own.get(number) for rank, own in sorted(ranks.items())},
            behind[0] if len(behind) == 1 else None,
            behind,
            {rank: ranks[rank].get(last[rank]) for rank in behind},
        )
    elif over and lowest == highest >= 0 and all(own[lowest].is_open for own in ranks.values()):
        calls = {rank: own[lowest] for rank, own in sorted(ranks.items())}
        yield Mismatch("stuck", group, lowest, calls)


def _across_groups(mismatches: Sequence[Mismatch]) -> Iterator[Mismatch]:
    """Yield two ranks that wait for each other, each in a group where the other is missing."""
    late = [(m, rank) for m in mismatches if m.kind == "behind" for rank in m.behind]
    for (one, behind), (other, behind_too) in combinations(late, 2):
        mine, its = other.calls.get(behind), one.calls.get(behind_too)
        if one.group != other.group and mine and its and mine.is_open and its.is_open:
            calls = dict(sorted({behind: mine, behind_too: its}.items()))
            yield Mismatch("groups", None, None, calls)
            return


def _without_numbers(
    ranks: Mapping[int, Sequence[CollectiveCall]], differ: Differ
) -> Iterator[Mismatch]:
    """Yield a mismatch between calls known only from stacks. It is certain only for two ranks."""
    waits = {rank: call for rank, own in sorted(ranks.items()) for call in own[-1:] if call.is_open}
    unknown = [rank for rank, call in waits.items() if call.number is None]
    if not unknown or len(ranks) < 2:
        return
    elsewhere = tuple(rank for rank in sorted(ranks) if rank not in waits)
    if elsewhere:
        last = {rank: next(iter(ranks[rank][-1:]), None) for rank in elsewhere}
        calls = {rank: waits.get(rank) for rank in sorted(ranks)}
        odd = elsewhere[0] if len(elsewhere) == 1 else None
        yield Mismatch("behind", None, None, calls, odd, elsewhere, last)
        return
    first = waits[unknown[0]]
    for call in (call for call in waits.values() if call is not first):
        kind, both = differ(first, call), {first.kind, call.kind}
        if both <= set(POINT_TO_POINT):
            kind = "operation" if len(both) == 1 else None
        if kind:
            yield Mismatch(kind, None, None, waits)
            return


def changed_places(mine: Sequence[Hashable], its: Sequence[Hashable]) -> int:
    """Count the calls that two ranks make in a different order, starting with a call that differs:
    a b c | c a b -> 3. Return 0 if the ranks do not make the same calls."""
    for size in range(2, min(WINDOW, len(mine), len(its)) + 1):
        if Counter(mine[:size]) == Counter(its[:size]):
            return size
    return 0


def from_flight_recorder(entries: Iterable[Mapping[str, Any]]) -> list[CollectiveCall]:
    """Convert Flight Recorder entries (gloo and NCCL, JSON and pickle). Send and recv are numbered
    separately, so their numbers do not match between ranks."""
    calls = []
    for entry in entries:
        name = str(entry.get("profiling_name", "?")).split(":")[-1]
        kind = kind_of(name) or name
        group = entry.get("process_group") or [entry.get("pg_id", 0)]
        is_p2p = bool(entry.get("is_p2p"))
        uneven = "coalesced" in name  # multiple tensors; ranks may pass different numbers of them
        sizes = entry.get("input_sizes")
        where = user_line(entry.get("frames"))
        calls.append(
            CollectiveCall(
                kind,
                None if is_p2p else str(group[0]),
                None if is_p2p else int(entry.get("collective_seq_id") or 0),
                None if uneven or sizes is None else tuple(tuple(map(int, size)) for size in sizes),
                site=where if kind in SAME_LINE else None,
                where=where,
                is_open=not entry.get("retired") and entry.get("state") != "completed",
            )
        )
    return calls


LIBRARIES = (
    *("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>", "threading.py"),
    *("concurrent/futures", "torch/distributed", "torch/nn"),
    *("/paralab/observe/", "/paralab/collectives/"),
)


def user_line(frames: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return the innermost line in the user's own code; frames list the innermost first."""
    for frame in frames or ():
        file = str(frame.get("filename", frame.get("file", "")))
        if file.endswith(".py") and not any(part in file for part in LIBRARIES):
            return f"{file}:{frame.get('line')}"
    return None
