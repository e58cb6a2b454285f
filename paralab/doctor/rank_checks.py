"""Functions that the checks of watched ranks share: they create findings from events, and compare
ranks."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import wraps

from paralab.doctor.events import Digest, Event, Off, Wrap
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.place import Place, Site
from paralab.doctor.registry import Check, Finding, Severity, check

NORM_TOLERANCE = 1e-5  # relative tolerance of norms: equal tensors have equal norms, up to rounding
SUM_TOLERANCE = 1e-3  # relative to the norm: sums cancel, so their rounding error is larger


def equal(one: list[float] | None, other: list[float] | None) -> bool:
    """Return whether two digests ([norm, sum]) may belong to equal tensors."""
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
    first, *others = digests
    return [i for i, one in enumerate(first) if any(not equal(one, other[i]) for other in others)]


def odd_one_out(values: Mapping[int, Hashable]) -> int | None:
    """Return the only rank that differs from all others. With two ranks, return None, because
    either may be wrong."""
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
    """Return whether every rank was watched from its start, so that no event is missing."""
    return len(seen.ranks) == seen.world and not any(rank.last(Off) for rank in seen.ranks)


def ddp_wraps(rank: WatchedRank) -> list[Wrap]:
    """Return the DDP models of a rank that still exist."""
    return [wrap for wrap in rank.of(Wrap) if wrap.kind == "ddp" and wrap.model is not None]


def is_data_parallel(seen: Observation) -> bool:
    return len(seen.ranks) > 1 and all(ddp_wraps(rank) for rank in seen.ranks)


def make_finding(
    id: str,
    severity: Severity,
    why: str,
    at: Event | Site | Place | None,
    evidence: str | Iterable[str] = (),
    rank: int | None = None,
    *,
    fix: str = "",
    doubt: str = "",
    gain: float | None = None,
) -> Finding:
    """Create a finding at the line of an event. `fix` replaces the entry's fix. `doubt` ("if …") is
    what would make the finding certain, and turns it into a suspect. `evidence` defaults to the
    line."""
    if doubt:
        severity, why = "suspect", f"{why} This is certain {doubt}."
    place = place_of(at)
    file, line = (place.file, place.line) if place else (None, None)
    shown = (evidence,) if isinstance(evidence, str) else tuple(evidence)
    if place and not shown:
        shown = (f"{place}: {place.code}",)
    return Finding(id, severity, why, fix, file, line, rank, shown, gain)


def check_each_rank(*ids: str) -> Callable[[Callable[[WatchedRank], Finding | None]], Check]:
    """Register a check of one rank. One finding is enough, because all ranks run the same
    script."""

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
