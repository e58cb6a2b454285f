"""Ranks that did not come where others wait: they raised, left, were killed, or are busy
elsewhere."""

from __future__ import annotations

import re

from paralab.analyse.stack_dumps import STOPPED
from paralab.doctor.coming_apart import early_exit, is_for_some_ranks, leaving, only_here
from paralab.doctor.events import Backward, Collective, Destroy, Forward, Pipeline
from paralab.doctor.finding import Finding
from paralab.doctor.lines import returns_before
from paralab.doctor.meetings import (
    Stuck,
    calls_from,
    is_same_call,
    members,
    named,
    raised_of_its_own,
    reached,
    stuck,
    timeout_seconds,
)
from paralab.doctor.observation import Numbered, Observation, RankSeen

UNUSED = "Expected to have finished reduction in the prior iteration"
# Errors that one rank may raise alone and that have entries of their own.
KNOWN = re.compile(
    rf"{UNUSED}|DDP expects same model|appears not to match sizes|marked as ready|Expected more than 1 value per channel|"
    r"EADDRINUSE|"
    r"Failed to run stage|num_chunks|arg_mbs|microbatches|state_dict|unscale|_scale is None|inf checks|process group has not been"
)
NO_GPU = re.compile(r"CUDA|NVIDIA|cuda")
TIMED_OUT = re.compile(r"Timed out waiting|timed out|timeout", re.IGNORECASE)


def used_other_parameters(seen: Observation) -> Finding | None:
    """After the same backward pass, ranks have gradients in different parameters, and DDP waits for
    the missing ones."""
    complaining = [rank for rank in seen.ranks if rank.raised and UNUSED in rank.raised.message]
    for one in seen.ranks:
        for other in seen.ranks:
            if one.rank == other.rank:
                continue
            for number, mine in enumerate(one.of(Backward)):
                theirs = other.of(Backward)
                its = theirs[number] if number < len(theirs) else None
                missing = mine.without_grad or []
                if not missing or (
                    its and its.without_grad and set(missing) <= set(its.without_grad)
                ):
                    continue
                waits = stuck(other)
                if its is not None and its.without_grad is not None and one not in complaining:
                    continue  # both came through: find_unused_parameters, or the gradients are there from before
                if one in complaining and other not in complaining and (waits or its is not None):
                    return _other_parameters(one, mine, missing, other)
                if (
                    waits
                    and isinstance(waits.operation, Backward)
                    and not one.raised
                    and seen.stalled_seconds
                ):
                    return _other_parameters(one, mine, missing, other)
    return None


def _other_parameters(
    one: RankSeen, mine: Backward, missing: list[str], other: RankSeen
) -> Finding:
    listed = ", ".join(missing[:4]) + (" …" if len(missing) > 4 else "")
    return Finding(
        "H14",
        "error",
        f"in this backward pass rank {one.rank} gave no gradient to {listed}, rank {other.rank} did: DDP reduces all gradients "
        "together, "
        f"so rank {other.rank} waits for values that rank {one.rank} never sends",
        "DistributedDataParallel(…, find_unused_parameters=True), or let every rank touch the branch: loss + 0.0 * unused.sum()",
        mine.site.file if mine.site else None,
        mine.site.line if mine.site else None,
        one.rank,
        (
            f"rank {one.rank}: without gradient: {listed}",
            *([f"rank {one.rank}: {one.raised.message[:160]}"] if one.raised else []),
        ),
    )


def raised_alone(seen: Observation) -> Finding | None:
    """One rank raised an exception of its own; the others are its victims."""
    if not seen.settled:
        return None  # the same may come on the others in the next moment
    own = [rank for rank in seen.ranks if raised_of_its_own(rank) and not was_stopped(rank)]
    if any(is_for_want_of_a_gpu(rank) for rank in own) or any(
        isinstance(event, Pipeline) and is_uneven(event)
        for rank in seen.ranks
        for event in rank.story
    ):
        return None
    if (
        not own
        or len(own) == len(seen.ranks)
        or any(KNOWN.search(rank.raised.message) for rank in own if rank.raised)
    ):
        return None
    rank = min(own, key=lambda rank: rank.raised.t if rank.raised else 0.0)
    raised = rank.raised
    assert raised is not None
    place = raised.place
    victims = [other for other in seen.ranks if other not in own]
    return Finding(
        "H11",
        "error",
        f"rank {rank.rank} raised {raised.type}: {raised.message.splitlines()[0][:200] if raised.message else ''} — on the "
        "other ranks "
        "this line went well, and what they report is only that rank " + f"{rank.rank} is gone",
        "fix the exception; the messages of the other ranks (connection closed, timeout) can be ignored",
        place.file if place else None,
        place.line if place else None,
        rank.rank,
        tuple(f"rank {victim.rank}: {_fate(victim)}" for victim in victims),
    )


def was_stopped(rank: RankSeen) -> bool:
    """Ctrl-C: the user's own doing."""
    return rank.raised is not None and rank.raised.type == "KeyboardInterrupt"


def is_uneven(event: Pipeline) -> bool:
    """The batch is not a multiple of the micro-batches: stages fail at it, each in its own way."""
    return bool(event.size and event.microbatches and event.size % event.microbatches)


def is_for_want_of_a_gpu(rank: RankSeen) -> bool:
    return bool(
        rank.start.gpus == 0
        and rank.raised
        and NO_GPU.search(f"{rank.raised.type}: {rank.raised.message}")
    )


def _fate(rank: RankSeen) -> str:
    where = stuck(rank)
    if where is None:
        return "ended with it"
    return f"{'failed' if where.failed else 'waits'} in {named(where.operation)}"


def did_not_come(seen: Observation) -> Finding | None:
    """The first meeting that somebody waits in, or failed in, and another one did not come to."""
    found = sorted(
        (where for rank in seen.ranks if (where := stuck(rank)) is not None),
        key=lambda where: where.number,
    )
    stopped = [rank for rank in seen.ranks if rank.state in STOPPED and not seen.ended_by_us]
    for rank in stopped if seen.stalled_seconds is not None else ():
        if victim := next((where for where in found if where.rank is not rank), None):
            return _late(victim, rank, "H10", STOPPED[rank.state or ""])
    for where in found:
        for rank in members(seen, where.group):
            if (
                rank is not where.rank
                and reached(rank, where.group) < where.number
                and (finding := _absent(seen, where, rank))
            ):
                return finding
    return _nobody_is_missing(seen, found)


def _nobody_is_missing(seen: Observation, found: list[Stuck]) -> Finding | None:
    """All of them wait in the same call."""
    if (
        seen.stalled_seconds is None
        or len(found) < seen.world
        or len({(where.group, where.number) for where in found}) != 1
    ):
        return None
    first = found[0]
    return Finding(
        "H10",
        "suspect",
        f"all {len(found)} ranks have been in {named(first.operation)} for {seen.stalled_seconds:.0f} s: nobody is missing, so "
        "what lies "
        "between them does not answer, or is that slow. Certain if a small all_reduce between the same machines does not "
        "return either",
        "look at the network between the ranks: `paralab doctor` without arguments times an all-reduce",
        first.place.file if first.place else None,
        first.place.line if first.place else None,
        None,
        tuple(f"rank {where.rank.rank}: {_fate(where.rank)}" for where in found),
    )


def _absent(seen: Observation, where: Stuck, rank: RankSeen) -> Finding | None:
    if seen.ended_by_us or rank.is_blind:
        return None  # who lives and who does not says nothing any more
    if rank.left is not None:
        return early_exit(rank, f"while rank {where.rank.rank} is in {named(where.operation)}")
    if rank.came_to_its_end and not rank.raised:
        return _finished(seen, where, rank)
    elsewhere = stuck(rank)
    if elsewhere is not None and elsewhere.group != where.group:
        return None
    if rank.state in STOPPED:
        return _late(where, rank, "H10", STOPPED[rank.state])
    timed_out = where.failed is not None and TIMED_OUT.search(where.failed) is not None
    if rank.lives is False and not timed_out and not rank.raised:
        return _killed(where, rank) if seen.stalled_seconds is not None or where.failed else None
    if rank.raised or not (timed_out or seen.stalled_seconds is not None):
        return None
    return _busy(seen, where, rank, timed_out)


def _finished(seen: Observation, where: Stuck, rank: RankSeen) -> Finding:
    operation = where.operation
    if calls_from(rank, operation) == 0:
        in_order = rank.last(Destroy) is not None
        if isinstance(operation, Forward) or (
            isinstance(operation, Collective) and (in_order or is_for_some_ranks(operation))
        ):
            return only_here(seen, where.rank, operation, rank, None)
        return _returned(where, rank)
    last: Numbered | None = next(
        (e for e in reversed(rank.story) if isinstance(e, Numbered) and is_same_call(operation, e)),
        None,
    )
    times = f"{calls_from(rank, operation)} rounds"
    met = f"rank {where.rank.rank} is in {named(operation)}"
    return leaving(rank, where.rank, last, None, False, f"after {times}", met)


def _returned(where: Stuck, rank: RankSeen) -> Finding:
    """It came to the end of the program on a way around the others' next meeting."""
    ways = []
    for place in where.operation.site.stack if where.operation.site else ():
        been = [
            p.line
            for e in rank.story
            if e.site
            for p in e.site.stack
            if (p.file, p.function) == (place.file, place.function)
        ]
        ways += returns_before(place, max((line for line in been if line < place.line), default=0))
        if ways:
            break
    way = ways[-1] if ways else None
    place_ = way.place if way else where.place
    told = (
        f"at this `{way.kind}` under `if {way.condition.test}`"
        if way and way.condition
        else "before it"
    )
    return Finding(
        "H02",
        "error",
        f"rank {rank.rank} came to the end of the program {told}, while rank {where.rank.rank} is in {named(where.operation)}: "
        "it leaves "
        "with exit code 0 and no message, and the others fail in its place",
        "let all ranks go the same way to the end: put only the work of one rank under the condition, not its leaving",
        place_.file if place_ else None,
        place_.line if place_ else None,
        rank.rank,
        (
            f"rank {rank.rank}: ended after {rank.made} optimizer steps",
            f"rank {where.rank.rank}: {_fate(where.rank)}",
        ),
    )


def _killed(where: Stuck, rank: RankSeen) -> Finding:
    last = rank.last_place
    return Finding(
        "H12",
        "error",
        f"the process of rank {rank.rank} is gone without an exception and without coming to its end: it was killed from "
        "outside (no "
        f"memory left on this machine, a scheduler's limit, kill -9), last seen at {last}",
        "look at the system's log for 'Out of memory' and at the scheduler's limits; fewer DataLoader workers or a smaller "
        "batch need less",
        None,
        None,
        rank.rank,
        (
            f"rank {rank.rank}: {rank.made} optimizer steps, then nothing",
            f"rank {where.rank.rank}: {_fate(where.rank)}",
        ),
    )


def _late(where: Stuck, rank: RankSeen, entry: str, what: str) -> Finding:
    at = rank.said.where if rank.said and rank.said.where else str(rank.last_place)
    return Finding(
        entry,
        "error",
        f"rank {rank.rank} {what}, at {at}; rank {where.rank.rank} waits for it in {named(where.operation)}",
        "let the process go on (kill -CONT), or find out what has stopped it",
        where.place.file if where.place else None,
        where.place.line if where.place else None,
        rank.rank,
        (f"rank {where.rank.rank}: {_fate(where.rank)}",),
    )


def _busy(seen: Observation, where: Stuck, rank: RankSeen, timed_out: bool) -> Finding:
    at = f"at {rank.said.where}" if rank.said and rank.said.where else f"after {rank.last_place}"
    limit = timeout_seconds(where.rank)
    patience = f"{limit:g} s" if limit else "30 minutes by default"
    waited = where.operation.seconds or seen.stalled_seconds or 0.0
    over = "and has given up" if timed_out else f"(its patience: {patience})"
    unsure = "" if timed_out else f". Certain when rank {rank.rank} is still there after {patience}"
    return Finding(
        "H13",
        "error" if timed_out else "suspect",
        f"rank {rank.rank} is busy with something else, {at}; rank {where.rank.rank} has waited {waited:.0f} s for it in "
        f"{named(where.operation)} {over}{unsure}",
        "do the long work before the job or before init_process_group, or give the group more patience: "
        "init_process_group(…, timeout=timedelta(hours=2))",
        where.place.file if where.place else None,
        where.place.line if where.place else None,
        rank.rank,
        (f"rank {rank.rank}: {at}", f"rank {where.rank.rank}: {_fate(where.rank)}"),
    )
