"""H05: Ranks swap two similar collectives and silently mix up their values.

Symptom: No error. Two reduced values are mixed up: part of the accuracy ends up in the loss.
Cause: Some ranks make two calls with the same operation and shape in a different order, so nothing fails.
Fix: Reduce in the same order on every rank, or pack the values into one tensor and reduce that.
Reported: alan-turing-institute/autocast#386

- if dist.get_rank() == 0:
-     dist.all_reduce(loss)
-     dist.all_reduce(accuracy)
- else:
-     dist.all_reduce(accuracy)
-     dist.all_reduce(loss)
+ both = torch.stack([loss, accuracy])
+ dist.all_reduce(both)
+ loss, accuracy = both
"""

import itertools

from paralab.analyse.collective_matching import changed_places
from paralab.doctor.events import Collective
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.place import Place
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.doctor.source_context import call_at, opposite, statement_at

Calls = dict[int, Collective]

ENTRY = describe(__doc__, silent=True)


@check("H05", source="ranks")
def swapped(seen: Observation) -> Findings:
    """Report two ranks that make the same calls in a different order. All calls match, so the
    results are wrong without an error.

    rank 0    all_reduce(loss)  all_reduce(acc)
    rank 1    all_reduce(acc)   all_reduce(loss)
    """
    for group in dict.fromkeys(group for rank in seen.ranks for group in rank.collectives):
        ranks = [(rank, _calls(rank, group)) for rank in seen.ranks]
        for (one, mine), (other, its) in itertools.combinations(ranks, 2):
            if window := _first_swap(mine, its):
                yield _report(one, mine, other, its, window)
                return


def _calls(rank: WatchedRank, group: str) -> Calls:
    """Return the finished collectives that the user's own code called, by number."""
    numbered = rank.collectives.get(group, {}).items()
    own = {number: call for number, call in numbered if isinstance(call, Collective)}
    return {n: c for n, c in own.items() if c.site and c.seconds is not None and not c.error}


def _code(place: Place) -> tuple[str, str]:
    """Return the code of a frame. One statement may contain multiple calls."""
    return statement_at(place), call_at(place)


def _text(call: Collective) -> tuple[tuple[str, str], ...]:
    """Return a call's code. The line cannot identify a call that both branches of an `if`
    contain."""
    assert call.site
    return tuple(map(_code, call.site.stack))


def _first_swap(mine: Calls, its: Calls) -> list[int] | None:
    numbers = sorted(set(mine) & set(its))
    # After the first difference, calls with equal numbers no longer correspond.
    differ = list(itertools.dropwhile(lambda n: _text(mine[n]) == _text(its[n]), numbers))
    together = list(
        itertools.takewhile(lambda n: mine[n].step == its[n].step == mine[differ[0]].step, differ)
    )
    many = changed_places([_text(mine[n]) for n in together], [_text(its[n]) for n in together])
    window = together[:many]
    return window if window and not _are_alternatives([mine[n] for n in window]) else None


def _are_alternatives(calls: list[Collective]) -> bool:
    """Return whether one rank's calls are in opposite branches of the same `if`. Its data decides
    which branch runs, and the script may intend the two calls to match."""
    sites = [call.site for call in calls if call.site]
    return any(opposite(one, other) for one, other in itertools.combinations(sites, 2))


def _report(
    one: WatchedRank, mine: Calls, other: WatchedRank, its: Calls, window: list[int]
) -> Finding:
    first, partner = _first_different(mine[window[0]], its[window[0]])
    why = (
        f"Collective number {window[0]} is `{call_at(first)}` on rank {one.rank} and "
        f"`{call_at(partner)}` at {partner} on rank {other.rank}. Both ranks silently got a mixture "
        "of the two values."
    )
    evidence = []
    for number in window[:4]:
        pair = zip((one.rank, other.rank), _first_different(mine[number], its[number]), strict=True)
        each = (f"rank {rank} {call_at(place)} at {place}" for rank, place in pair)
        evidence.append(f"number {number}: {' | '.join(each)}")
    return make_finding("H05", "error", why, first, evidence)


def _first_different(mine: Collective, its: Collective) -> tuple[Place, Place]:
    """Return the innermost frames whose code differs: a helper's caller, not the helper."""
    assert mine.site
    assert its.site
    pairs = list(zip(mine.site.stack, its.site.stack, strict=False))
    return next((pair for pair in pairs if _code(pair[0]) != _code(pair[1])), pairs[0])
