"""What the checks of watched ranks share: findings from events, and whether ranks agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import wraps

from paralab.doctor.events import Digest, Event, Off, Wrap
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.place import Place, Site
from paralab.doctor.registry import Check, check, entries

NORM_TOLERANCE = 1e-5  # of the norm: equal tensors give equal norms up to rounding
SUM_TOLERANCE = 1e-3  # of the norm: sums cancel, and round more


def equal(one: list[float] | None, other: list[float] | None) -> bool:
    """Do two digests, [norm, sum] each, belong to equal tensors, as far as they show?"""
    if one is None or other is None:
        return one is other
    if one[0] < 0 or other[0] < 0:  # NaN, infinity
        return one[0] == other[0]
    largest = max(one[0], other[0])
    return (
        abs(one[0] - other[0]) <= NORM_TOLERANCE * largest
        and abs(one[1] - other[1]) <= SUM_TOLERANCE * largest
    )


def differing(digests: Iterable[Digest]) -> list[int]:
    """The positions at which ranks hold different tensors."""
    first, *others = digests
    return [i for i, one in enumerate(first) if any(not equal(one, other[i]) for other in others)]


def odd_one_out(values: Mapping[int, Hashable]) -> int | None:
    """The one rank that differs while all others agree. None for two ranks: either may be wrong."""
    counts = Counter(values.values())
    if len(counts) != 2 or len(values) < 3:
        return None
    odd = [rank for rank, value in values.items() if counts[value] == 1]
    return odd[0] if odd else None


def listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def place_of(at: Event | Site | Place | None) -> Place | None:
    site = at.site if isinstance(at, Event) else at
    return site.place if isinstance(site, Site) else site


def watched(seen: Observation) -> bool:
    """Was every rank observed from its start? Then what is missing did not happen."""
    return len(seen.ranks) == seen.world and not any(rank.last(Off) for rank in seen.ranks)


def ddp_wraps(rank: WatchedRank) -> list[Wrap]:
    """The DDP models of a rank that still exist."""
    return [wrap for wrap in rank.of(Wrap) if wrap.kind == "ddp" and wrap.model is not None]


def is_data_parallel(seen: Observation) -> bool:
    """Does every rank have a DDP model?"""
    return len(seen.ranks) > 1 and all(ddp_wraps(rank) for rank in seen.ranks)


def make_finding(
    id: str,
    severity: Severity,
    why: str,
    at: Event | Site | Place | None,
    evidence: str | Iterable[str] = (),
    rank: int | None = None,
    *,
    fix: str | None = None,
    doubt: str = "",
    gain: float | None = None,
) -> Finding:
    """A finding at the line of an event. `fix`: if the entry's does not fit this case. `doubt`:
    what would make it certain ("if …"); it makes the finding a suspect."""
    if doubt:
        severity, why = "suspect", f"{why} Certain {doubt}."
    place = place_of(at)
    file, line = (place.file, place.line) if place else (None, None)
    shown = (evidence,) if isinstance(evidence, str) else tuple(evidence)
    return Finding(id, severity, why, fix or entries[id].fix, file, line, rank, shown, gain)


def check_each_rank(*ids: str) -> Callable[[Callable[[WatchedRank], Finding | None]], Check]:
    """Register a check of one watched rank. One finding is enough: the ranks run the same script."""

    def register(find: Callable[[WatchedRank], Finding | None]) -> Check:
        @wraps(find)
        def check_ranks(seen: Observation) -> Finding | None:
            return next(filter(None, map(find, seen.ranks)), None)

        return check(*ids, source="ranks")(check_ranks)

    return register


def ranks_by_host(seen: Observation) -> dict[str, list[WatchedRank]]:
    hosts: dict[str, list[WatchedRank]] = {}
    for rank in seen.ranks:
        hosts.setdefault(rank.start.host, []).append(rank)
    return hosts
