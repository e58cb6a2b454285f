"""Explain logs in which ranks waited for another rank or lost it, but no rank printed the cause.
The position of each rank in the user's code shows what went wrong."""

import re
from collections.abc import Iterable
from dataclasses import replace

from paralab.doctor.logs.blame import Event, blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line
from paralab.doctor.messages import explains, find_message, named
from paralab.doctor.registry import Finding, Findings, Severity, check
from paralab.record.victims import MISMATCH

BYTES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
IF_CONDITION = "This is certain if that line is under a rank condition"
BARRIER = re.compile(r"\[Rank (\d+)\]: Ranks ([\d, ]+) failed to pass monitoredBarrier")


@check("H01", "H02", "H03", "H04", "H06", "H07", "H13", "H15", source="log")
def waited_for_a_rank(logs: Logs) -> Findings:
    found = blame(logs)
    victims = [event for event in found.victims if event.trace]
    mixed = [line for line in logs.lines if MISMATCH.search(line.text)]
    if any(event.trace for event in found.roots) or any(explains(logs, v) for v in victims):
        return
    if mixed and not any(find_message(line.text) for line in mixed):
        yield _sizes_differ(logs, victims, mixed)
        return
    waiting = [event for event in victims if event.waited]
    if found.roots or not victims:
        return
    if waiting:
        others = [event for event in victims if event.rank != waiting[0].rank and event.at]
        barrier = BARRIER.search(waiting[0].trace.text if waiting[0].trace else "")
        if others and not (found.absent or barrier):
            yield _two_places(logs, waiting[0], others[0])
        elif found.absent or waiting[0].at:
            yield _nobody_came(logs, waiting[0])
    elif not found.unknown and not any(event.exit for event in found.victims):
        yield from _left_early(logs, victims[0])


def _describe_position(event: Event) -> str:
    """Return where a rank was: "in `loss.backward()` (train.py:31), where DDP averages …"."""
    if event.at is None:
        return "at an unknown line"
    text = f"in `{event.at.code}` ({event.at.file}:{event.at.line})"
    if event.in_backward:
        return f"{text}, where DDP averages the gradients"
    return f"{text}, where DDP broadcasts the buffers" if event.in_buffers else text


def _suspect(id: str, event: Event, why: str, rank: int | None, more: Iterable[str]) -> Finding:
    return event.finding(id, "suspect", why, rank=rank, evidence=(*event.evidence(), *more))


def _alone(event: Event, why: str, more: Iterable[str] = ()) -> Finding:
    """Blame the rank that waited, because its call is under a rank condition."""
    why = f"{why} The call is under a rank condition, so the other ranks never make it."
    found = _suspect("H07" if event.in_buffers else "H03", event, why, event.rank, more)
    return replace(found, severity="error")


def _sizes_differ(logs: Logs, victims: list[Event], lines: list[Line]) -> Finding:
    sizes = next((match for line in lines if (match := BYTES.search(line.text))), None)
    counted = f" ({sizes[1]} and {sizes[2]} bytes)" if sizes else ""
    counted = f"In one collective, the ranks sent tensors of different sizes{counted}. "
    evidence = tuple(map(str, lines[:2]))
    for event in victims:
        why = f"{counted}{named([event.rank])} was {_describe_position(event)}"
        if event.in_buffers and event.alone:
            return _alone(event, f"{why}.", evidence)
        if event.in_buffers:
            why += f", and another rank was not. {IF_CONDITION}."
            return _suspect("H07", event, why, None, evidence)
        if event.in_backward:  # DDP's buckets have the same size on all ranks
            aborted = [e.rank for e in blame(logs).victims if e.exit and e.rank is not None]
            rank = aborted[0] if len(aborted) == 1 and len(logs.ranks) == 2 else None
            why += (
                "; another rank was in another collective. Only that rank calls this collective, "
                "or it had fewer batches (H01) and moved on. The Flight Recorder would confirm "
                "this."
            )
            found = _suspect("H03", event, why, rank, evidence)
            return replace(found, file=None, line=None)  # the wrong call is on the other rank
    first = next((event for event in victims if event.at), None)
    if first is None:
        return Finding("H06", "error", counted, evidence=evidence)
    why = f"{counted}{named([first.rank])} was {_describe_position(first)}."
    return first.finding("H06", "error", why, evidence=(*evidence, *first.evidence()))


def _nobody_came(logs: Logs, first: Event) -> Finding:
    barrier = BARRIER.search(first.trace.text) if first.trace else None
    absent = [int(rank) for rank in barrier[2].split(",")] if barrier else blame(logs).absent
    rank = absent[0] if len(absent) == 1 else None
    last = logs.last.get(rank) if rank is not None and not barrier else None
    who, more = named(absent) if absent else "Another rank", [str(last)] if last else []
    why = f"{named([first.rank])} waited until its timeout {_describe_position(first)}. {who} never arrived"
    why += f"; the last line there is `{last.text.strip()[:160]}`." if last else "."
    if first.alone:
        return _alone(first, why, more)
    if first.in_buffers:
        why += f" One of these ranks calls the model alone. {IF_CONDITION}."
        return _suspect("H07", first, why, None, more)
    if first.in_backward:
        why += " It had fewer batches (H01), left the loop (H08), or hangs. Compare len(loader)."
        return _suspect("H01", first, why, rank, more)
    if first.alone is False:
        why += " The call is not under a rank condition: that rank hangs, or took a different path."
        return _suspect("H03", first, why, rank, more)
    why += f" {IF_CONDITION}; if not, the missing rank hangs elsewhere."
    return _suspect("H03", first, why, None, more)


def _two_places(logs: Logs, first: Event, other: Event) -> Finding:
    why = f"{named([first.rank])} waited until its timeout {_describe_position(first)}"
    who, more = named([other.rank]), other.evidence()
    if first.at == other.at and other.waited:
        if first.at and "recv(" in first.at.code and len(logs.ranks) == 2:
            why += f". {who} waited there, too: both ranks receive, and neither sends."
            return _suspect("H04", first, why, None, more)
        why += (
            f". {who} waited there, too. No rank is missing, so the network between them is "
            "broken, "
        )
        why += "or one of them had called another collective before."
        return _suspect("H15", first, why, None, more)
    if first.at == other.at:
        why += f". {who} reached the same line later: its work took longer than the timeout."
        return _suspect("H13", first, why, other.rank, more)
    why += f", while {who[0].lower()}{who[1:]} was {_describe_position(other)}."
    if first.in_backward != other.in_backward:
        training, behind = (first, other) if first.in_backward else (other, first)
        why += f" {named([behind.rank])} has left the training loop: it had fewer batches, or it "
        why += "stopped early (H08). Compare len(loader) on all ranks."
        return _suspect("H01", training, why, behind.rank, more)
    why += " The two calls are different collectives, so both wait forever."
    return _suspect("H04", first, why, None, more)


def _left_early(logs: Logs, first: Event) -> Findings:
    """Report a rank that exited with code 0: the others lost their connection to it, and no rank
    failed."""
    was = f"{named([first.rank])} was {_describe_position(first)}"
    if first.alone:
        yield _alone(first, f"{was} after the others had exited.")
        return
    silent, sure = blame(logs).silent, first.alone is False
    if not silent and not logs.exits and not sure and first.rank is None:
        return  # a single pasted message, which H11 explains
    rank = silent[0] if len(silent) == 1 and sure else None
    last = logs.last.get(rank) if rank is not None else None
    who = f"Rank {rank}" if rank is not None else f"One of {silent}" if silent else "Another rank"
    was = was[0].lower() + was[1:]
    why = f"{who} exited without an error while {was}."
    why += f" Its last line is `{last.text.strip()[:200]}`." if last else ""
    if not sure:
        why += " This is certain if that line is not under a rank condition; if it is, only that rank makes the call."
    elif rank is None or not logs.exits:
        why += " The logs of all ranks and of the launcher would confirm this."
    evidence = (*first.evidence(), *([str(last)] if last else []))
    severity: Severity = "error" if rank is not None and logs.exits else "suspect"
    yield Finding("H02", severity, why, rank=rank, evidence=evidence)
    if first.in_backward and (logs.exits or rank is not None):
        why = f"{who} exited while {was}. If it reached the end of its loop, it had fewer batches. "
        yield _suspect("H01", first, f"{why}Compare len(loader).", rank, evidence[-1:])
