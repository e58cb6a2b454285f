"""Ranks that waited for one that did not come, or met another collective than their own: gloo's
timeouts and size errors, and the messages of TORCH_DISTRIBUTED_DEBUG=DETAIL. Where each victim
stood in the user's code tells what kind of mistake it was."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.blame import Event
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line
from paralab.doctor.logs.places import alone, stands
from paralab.doctor.logs.said import blamed, claims, errors, tells
from paralab.units import plural

FINGERPRINTS = claims(
    r"Detected mismatch between collectives on ranks\. Rank (\d+) is running collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(\d+), )?OpType=(\w+)(?:, TensorShape=(\[[\d, ]*\]))?.*?but Rank (\d+) is running collective: "
    r"CollectiveFingerPrint\((?:SequenceNumber=\d+, )?OpType=(\w+)(?:, TensorShape=(\[[\d, ]*\]))?"
)
BYTES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
UNEQUAL = re.compile(r"collective mismatch in your code")
MONITORED = re.compile(
    r"\[Rank (\d+)\]: Ranks ([\d, ]+) failed to pass monitoredBarrier in (\d+) ms"
)
PATIENCE = re.compile(r"Timed out waiting (\d+) ?ms")
EVALUATING = re.compile(r"eval|valid|\btest|predict|infer|accuracy", re.IGNORECASE)


def _finding(
    id: str, event: Event, why: str, fix: str, rank: int | None, more: tuple[str, ...] = ()
) -> Finding:
    at = event.trace.where if event.trace else None
    evidence = (*event.evidence(), *more)
    return Finding(
        id, "suspect", why, fix, at.file if at else None, at.line if at else None, rank, evidence
    )


@tells("H04", "H06")
def fingerprints_differ(logs: Logs) -> Iterator[Finding]:
    """Also H06: the same operation with other sizes."""
    if said := errors(logs, FINGERPRINTS):
        one, number, operation, shape, other, others, shapes = said.match.groups()
        id, fix = (
            "H04",
            "call the same collectives in the same order on all ranks: no rank condition around them",
        )
        if operation == others:
            id, fix = (
                "H06",
                "pad to the largest size, use all_gather_object, or drop the ragged last batch (drop_last=True)",
            )
        yield said.of_all().finding(
            id,
            "error",
            f"At collective {number or '?'} rank {one} calls {operation} with shape {shape or '?'} and rank {other} calls "
            f"{others} with shape {shapes or '?'}{said.at}: collectives meet by their order, not by their name.",
            fix,
        )


@tells("H03", "H06", "H07")
def sizes_differ(logs: Logs) -> Iterator[Finding]:
    """Also H07: what met the other rank's collective was DDP's broadcast of buffers."""
    found: list[Line] = [
        line for line in logs.lines if UNEQUAL.search(line.text) or BYTES.search(line.text)
    ]
    if not found or any(event.trace for event in blamed(logs).roots):
        return
    sizes = next((match for line in found if (match := BYTES.search(line.text))), None)
    counted = (
        f"{sizes[1]} bytes came where {sizes[2]} were expected"
        if sizes
        else "another size came than was expected"
    )
    evidence = tuple(str(line) for line in found[:2])
    for event in blamed(logs).victims:
        if event.in_buffers:
            yield _of_buffers(event, f"{counted}: ", evidence)
            return
        if event.in_backward:
            yield _beside_the_gradients(logs, event, counted, sizes, evidence)
            return
    told = [event for event in blamed(logs).victims if event.trace and event.trace.where]
    at = told[0].trace.where if told and told[0].trace else None
    yield Finding(
        "H06",
        "error",
        f"In one collective {counted}: the ranks bring tensors of different sizes, or are in different collectives."
        + (
            f" Rank {told[0].rank} was {stands(told[0])}."
            if told
            else " The rank that aborted leaves no Python line."
        ),
        "bring the same shape on all ranks: pad to the largest, all_gather_object, drop_last=True; the flight recorder names "
        "both lines",
        at.file if at else None,
        at.line if at else None,
        None,
        (*evidence, *(told[0].evidence() if told else ())),
    )


def _beside_the_gradients(
    logs: Logs, event: Event, counted: str, sizes: re.Match[str] | None, evidence: tuple[str, ...]
) -> Finding:
    """DDP's buckets are equal on all ranks, so what met them was another collective."""
    aborted = [
        other.rank for other in blamed(logs).victims if other.exit and other.rank is not None
    ]
    rank = aborted[0] if len(aborted) == 1 and len(logs.ranks) == 2 else None
    least = min(int(sizes[1]), int(sizes[2])) if sizes else None
    small = (
        f" ({least} bytes: {plural(least // 4, 'value')} in float32, as a metric or a flag has)"
        if least and least <= 64
        else ""
    )
    who = f"rank {rank}" if rank is not None else "another rank"
    return Finding(  # without a place: the line that is known is the victim's
        "H03",
        "suspect",
        f"{counted[:1].upper()}{counted[1:]}: while rank {event.rank} was {stands(event)}, {who} was in another "
        f"collective{small}. Either it calls that one alone, under a rank condition, or it had fewer batches (H01) and has gone "
        "on. Certain with the flight recorder.",
        "call every collective on all ranks, after the same number of steps",
        rank=rank,
        evidence=(*evidence, *event.evidence()),
    )


def _of_buffers(event: Event, counted: str, evidence: tuple[str, ...]) -> Finding:
    if event.alone:
        return alone(
            event,
            f"{counted}rank {event.rank} was {stands(event)}, under a rank condition.",
            evidence,
        )
    at = event.trace.where if event.trace else None
    looks = at is not None and bool(EVALUATING.search(at.function) or EVALUATING.search(at.code))
    return _finding(
        "H07",
        event,
        f"{counted}rank {event.rank} was {stands(event)}, and another rank was not. "
        + (
            "It looks like an evaluation that only this rank does"
            if looks
            else "One of them calls the model alone"
        )
        + "; the wrapper broadcasts buffers (BatchNorm) at every forward, and that takes all ranks. Certain if that line "
        "is under a rank condition.",
        "evaluate on all ranks, or through model.module(...) under the rank condition",
        None,
        evidence,
    )


@tells("H03", "H07")
def did_not_pass_the_barrier(logs: Logs) -> Iterator[Finding]:
    waiting = [
        (event, found)
        for event in blamed(logs).victims
        if event.trace and (found := MONITORED.search(event.trace.text))
    ]
    if blamed(logs).roots or not waiting:
        return
    event, found = waiting[0]
    who, missing, patience = found.groups()
    ranks = [int(rank) for rank in missing.replace(" ", "").split(",") if rank]
    why = f"Rank {who} waited {int(patience) / 1000:g} s {stands(event)}, and rank {missing.strip()} did not come."
    if event.alone:
        yield alone(event, f"{why} The call stands under a rank condition.")
        return
    rank = ranks[0] if len(ranks) == 1 and event.alone is False else None
    why += " Either the call stands under a rank condition, or that rank hangs elsewhere."
    yield _finding(
        "H03",
        event,
        why,
        "move the collective out of the rank condition, so that all ranks call it",
        rank,
    )


@tells("H01", "H03", "H04", "H07", "H13", "H15")
def waited_in_vain(logs: Logs) -> Iterator[Finding]:
    """H01, H03, H04, H07, H13: whoever timed out is a victim; the place where it waited tells of
    what."""
    blame = blamed(logs)
    waiting = [
        event for event in blame.victims if event.trace and PATIENCE.search(event.trace.text)
    ]
    if blame.roots or not waiting or any(UNEQUAL.search(line.text) for line in logs.lines):
        return
    first = waiting[0]
    limit = PATIENCE.search(first.trace.text if first.trace else "")
    waited = f"Rank {first.rank} waited {int(limit[1]) / 1000:g} s {stands(first)}" if limit else ""
    others = [
        event
        for event in blame.victims
        if event.trace and event.rank != first.rank and event.trace.where
    ]
    if blame.absent:
        yield _nobody_came(logs, first, waited)
    elif others:
        yield _two_places(first, others[0], waited)


def _nobody_came(logs: Logs, first: Event, waited: str) -> Finding:
    absent = blamed(logs).absent
    rank = absent[0] if len(absent) == 1 else None
    who = f"rank {rank}" if rank is not None else "one of the ranks " + ", ".join(map(str, absent))
    last = logs.last.get(rank) if rank is not None else None
    says = f" Its last line is `{last.text.strip()[:160]}`." if last else ""
    came = f"{waited}, and {who}, which left no error, did not come.{says}"
    more = (str(last),) if last else ()
    if first.alone:
        return alone(first, f"{came} The call stands under a rank condition.", more)
    if first.in_buffers:
        return _of_buffers(first, f"{came} ", more)
    if first.in_backward:
        return _finding(
            "H01",
            first,
            f"{came} It had fewer batches, left the loop early, or hangs. Certain with len(loader) of each rank.",
            "DistributedSampler with drop_last=True, the same number of steps everywhere, `with model.join():`, or break "
            "together on an all-reduced flag",
            rank,
            more,
        )
    return _finding(
        "H03",
        first,
        f"{came} "
        + (
            "The call does not stand under a rank condition: that rank is busy for longer than the timeout, hangs, or left "
            "elsewhere."
            if first.alone is False
            else "Either the call stands under a rank condition, or that rank is busy for longer than the timeout, hangs, or left "
            "elsewhere. Certain with that line: is it under `if rank == …`?"
        ),
        "call the collective on all ranks; do only the local work (saving, printing) under the rank condition",
        rank if first.alone is False else None,
        more,
    )


def _two_places(first: Event, other: Event, waited: str) -> Finding:
    both = f"{waited}, while rank {other.rank} was {stands(other)}."
    if first.where == other.where:
        return _finding(
            "H13" if not other.waited else "H15",
            first,
            f"{waited}, and rank {other.rank} came to the same line"
            + (
                " only afterwards: it was busy for longer than the timeout."
                if not other.waited
                else " and waited too: nobody is missing, so the "
                "network between them is, or a collective before this line was called by one of them only."
            ),
            "a larger timeout= in init_process_group, or less work between collectives"
            if not other.waited
            else "check the addresses that "
            "gloo chose (GLOO_SOCKET_IFNAME) and the firewall; the flight recorder tells what each rank called",
            other.rank if not other.waited else None,
            other.evidence(),
        )
    if first.in_backward != other.in_backward:
        behind = other if first.in_backward else first
        return _finding(
            "H01",
            first if first.in_backward else other,
            f"{both} Rank {behind.rank} has left the training loop, the other one has not: it had fewer batches, or broke off. "
            "Certain with len(loader) of each rank.",
            "DistributedSampler with drop_last=True, the same number of steps everywhere, or break together on an all-reduced flag",
            behind.rank,
            other.evidence(),
        )
    return _finding(
        "H04",
        first,
        f"{both} The ranks are in different collectives, so each waits for ever: they call them in a different order. Certain "
        "with TORCH_DISTRIBUTED_DEBUG=DETAIL (without DDP) or the flight recorder.",
        "call the same collectives in the same order on all ranks: no rank condition around them",
        None,
        other.evidence(),
    )
