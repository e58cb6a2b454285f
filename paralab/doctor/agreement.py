"""Do ranks agree? Digests of tensors are compared with a tolerance; of three or more ranks the
majority says who is the odd one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from paralab.doctor.events import Digest, Event, Off, Wrap
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.place import Place

NORM_TOLERANCE = 1e-5  # of the norm: equal tensors give equal norms up to rounding
SUM_TOLERANCE = 1e-3  # of the norm: sums cancel, and round more


def equal(one: list[float] | None, other: list[float] | None) -> bool:
    """Two digests, [norm, sum] each, are of equal tensors as far as one can tell."""
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
    """The places at which not all ranks hold equal tensors."""
    first, *others = digests
    return [i for i, one in enumerate(first) if any(not equal(one, other[i]) for other in others)]


def odd_one_out(values: Mapping[int, Hashable]) -> int | None:
    """The one rank that differs from a majority of the others, which agree; None for two ranks, of
    whom either may be wrong."""
    counts = Counter(values.values())
    if len(counts) != 2 or len(values) < 3:
        return None
    (_, most), (rare, least) = counts.most_common(2)
    return (
        next(rank for rank, value in values.items() if value == rare) if least == 1 < most else None
    )


def listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def place_of(event: Event | None) -> Place | None:
    return event.site.place if event is not None and event.site else None


def found(
    id: str,
    severity: Severity,
    why: str,
    fix: str,
    place: Place | None,
    evidence: Iterable[str] = (),
    rank: int | None = None,
    gain: float | None = None,
) -> Finding:
    return Finding(
        id,
        severity,
        why,
        fix,
        place.file if place else None,
        place.line if place else None,
        rank,
        tuple(evidence),
        gain,
    )


def watched(seen: Observation) -> bool:
    """All ranks were seen from their beginning to now: what is missing has not happened."""
    return len(seen.ranks) == seen.world and not any(rank.last(Off) for rank in seen.ranks)


def wraps(rank: RankSeen) -> list[Wrap]:
    """Its models under DDP that are there."""
    return [wrap for wrap in rank.of(Wrap) if wrap.kind == "ddp" and wrap.model is not None]


def is_data_parallel(seen: Observation) -> bool:
    """Every rank has a model under DDP, and there are no smaller groups in which ranks could
    rightly share their data."""
    return len(seen.ranks) > 1 and all(wraps(rank) for rank in seen.ranks)
