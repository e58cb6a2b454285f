"""H11, H14: one rank fails on its own, or its backward pass skips parameters."""

import re
from itertools import permutations

from paralab.doctor.events import Backward, Pipeline
from paralab.doctor.failures.hangs.missing_ranks import describe_end
from paralab.doctor.failures.semantics.s01_unused_parameters import UNFINISHED
from paralab.doctor.messages import find_message
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.rank_checks import listed, make_finding
from paralab.doctor.rank_collectives import find_stuck, raised_of_its_own
from paralab.doctor.registry import Finding

NO_GPU = re.compile(r"CUDA|NVIDIA|cuda")


def used_other_parameters(seen: Observation) -> Finding | None:
    """Report ranks whose backward passes reach different parameters, so that DDP waits."""
    complaining = [rank for rank in seen.ranks if rank.raised and UNFINISHED in rank.raised.message]
    for one, other in permutations(seen.ranks, 2):
        waits, theirs = find_stuck(other), other.of(Backward)
        for number, mine in enumerate(one.of(Backward)):
            its = theirs[number].without_grad if number < len(theirs) else None
            missing = mine.without_grad or []
            if not missing or (its and set(missing) <= set(its)):
                continue
            if one in complaining:
                is_cause = other not in complaining and bool(waits or number < len(theirs))
            else:  # unless both ranks finished, gradients are old, or DDP finds unused parameters
                hangs = waits is not None and isinstance(waits.operation, Backward)
                is_cause = bool(its is None and hangs and not one.raised and seen.stalled_seconds)
            if is_cause:
                return _other_parameters(one, mine, missing, other)
    return None


def _other_parameters(
    one: WatchedRank, mine: Backward, missing: list[str], other: WatchedRank
) -> Finding:
    names = listed(missing)
    evidence = [f"rank {one.rank}: without gradient: {names}"]
    evidence += [f"rank {one.rank}: {one.raised.message[:160]}"] if one.raised else []
    why = (
        f"In this backward pass, rank {one.rank} computes no gradient for {names}, but rank "
        f"{other.rank} does, and waits for values that rank {one.rank} never sends."
    )
    return make_finding("H14", "error", why, mine, evidence, one.rank)


def raised_alone(seen: Observation) -> Finding | None:
    """Report the one rank that raised its own exception; the other ranks are its victims."""
    if not seen.settled:
        return None  # the others may be about to raise the same exception
    own = [rank for rank in seen.ranks if raised_of_its_own(rank) and not was_stopped(rank)]
    pipelines = (e for rank in seen.ranks for e in rank.story if isinstance(e, Pipeline))
    if not own or len(own) == len(seen.ranks) or any(is_uneven(event) for event in pipelines):
        return None
    if any(needs_missing_gpu(rank) or _has_entry(rank) for rank in own):
        return None
    rank = min(own, key=lambda rank: rank.raised.t if rank.raised else 0.0)
    raised = rank.raised
    assert raised is not None
    message = raised.message.splitlines()[0][:200] if raised.message else ""
    why = (
        f"Rank {rank.rank} raised {raised.type}: {message}. The other ranks failed only because "
        f"rank {rank.rank} exited."
    )
    fix = "Fix this exception. Ignore the errors of the other ranks (connection closed, timeout)."
    victims = [victim for victim in seen.ranks if victim not in own]
    evidence = [describe_end(victim) for victim in victims]
    return make_finding("H11", "error", why, raised.place, evidence, rank.rank, fix=fix)


def was_stopped(rank: WatchedRank) -> bool:
    return rank.raised is not None and rank.raised.type == "KeyboardInterrupt"


def is_uneven(event: Pipeline) -> bool:
    """Return whether the micro-batches differ in size, which makes each stage fail differently."""
    return bool(event.size and event.microbatches and event.size % event.microbatches)


def _has_entry(rank: WatchedRank) -> bool:
    known = find_message(f"{rank.raised.type}: {rank.raised.message}") if rank.raised else None
    return known is not None and known.entry.id != "H11"


def needs_missing_gpu(rank: WatchedRank) -> bool:
    raised = rank.raised
    needs_gpu = raised and NO_GPU.search(f"{raised.type}: {raised.message}")
    return bool(rank.start.gpus == 0 and needs_gpu)
