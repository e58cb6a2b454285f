"""Find the backward passes that synchronize gradients, in a script and on watched ranks."""

from collections.abc import Iterator

from paralab.doctor.failures.accumulation.windows import timelines
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.rank_checks import ddp_wraps
from paralab.doctor.static.collective_tree import passes_ddp
from paralab.doctor.static.models import is_without_grad
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event, excludes
from paralab.doctor.windows import MicroStep, Window, accumulated


def forwards_of(script: Script, backward: Event) -> list[Event]:
    """Return the DDP forward passes whose outputs this backward pass uses."""
    if not passes_ddp(script, backward.call.receiver, backward.call.scope):
        return []
    for events in timelines(script):
        if backward in events:
            before = [one for one in events[: events.index(backward)] if one.role in _ENDS]
            found: list[Event] = []
            for event in reversed(before):
                if excludes(event, backward) or is_without_grad(script, event.call):
                    continue
                if event.role != "forward":
                    break
                found.insert(0, event)
            return found
    return []


_ENDS = ("forward", "backward", "step")


def wasteful(seen: Observation) -> Iterator[tuple[WatchedRank, Window, list[MicroStep]]]:
    """For each rank, yield a step that synchronizes more than once, and its passes in which
    `no_sync` covers only backward."""
    for rank in seen.ranks if seen.world > 1 else []:
        every = list(accumulated(rank)) if ddp_wraps(rank) else []
        many = [window for window in every if sum(map(reduces, window.micro_steps)) > 1]
        if not many or 2 * len(many) < len(every):
            continue
        window = many[-1]  # in the first step, DDP also sends its bucket layout
        inside = [
            one
            for one in window.micro_steps[:-1]
            if one.backward.unsynced and any(forward.sync for forward in one.forwards)
        ]
        yield rank, window, inside


def reduces(one: MicroStep) -> bool:
    return bool(one.backward.seq and one.backward.seq[1] >= one.backward.seq[0])
