"""How far each rank went in each pass over a DataLoader, and where it met the others for the last
time in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paralab.doctor.events import Backward, Batch, Collective, Epoch, Forward, Loader
from paralab.doctor.lines import is_outside
from paralab.doctor.observation import Numbered, RankSeen


@dataclass
class Pass:
    """`batches`: taken. `met_in`: the number of the last batch in which this rank met the others.
    `exhausted`: the loader came to its end. `over`: the rank went on to something else
    (`exhausted`, or it left early)."""

    loader: Loader
    batches: int = 0
    met_in: int = 0
    last_meeting: Numbered | None = None
    exhausted: Epoch | None = None
    over: bool = False
    meetings: list[Numbered] = field(default_factory=list)


def passes(rank: RankSeen) -> dict[tuple[int, int], Pass]:
    """(loader, epoch) -> what this rank did in it."""
    found: dict[tuple[int, int], Pass] = {}
    current: Pass | None = None
    for event in (*rank.story, *rank.doing):
        if isinstance(event, Loader):
            for (loader, _), earlier in found.items():
                earlier.over = earlier.over or loader == event.loader
            current = found[event.loader, event.epoch] = Pass(event)
        elif isinstance(event, Batch) and (event.loader, event.epoch) in found:
            current = found[event.loader, event.epoch]
            current.batches = event.batch
        elif isinstance(event, Epoch) and (event.loader, event.epoch) in found:
            ended = found[event.loader, event.epoch]
            ended.exhausted, ended.over = event, True
        elif (
            current is not None
            and not current.over
            and isinstance(event, Numbered)
            and _meets(event)
        ):
            current.over = _is_left(current, event)
            if current.over or (event in rank.doing and not rank.settled):
                continue  # what is open may come to its end in the next moment
            current.met_in, current.last_meeting = current.batches, event
            current.meetings.append(event)
    if rank.came_to_its_end:
        for each in found.values():
            each.over = True
    return found


def _is_left(current: Pass, event: Numbered) -> bool:
    """The ranks met inside the loop over the loader, and this meeting is outside."""
    loop = current.loader.site
    inside = current.meetings[0].site if current.meetings else None
    if loop is None or inside is None or event.site is None or event.site is inside:
        return False
    return is_outside(event.site, loop) and not is_outside(inside, loop)


def _meets(event: Numbered) -> bool:
    """It made collectives, or is inside one, or failed there."""
    if not isinstance(event, (Backward, Forward, Collective)) or not event.seq:
        return False
    return (
        event.seq[1] >= event.seq[0]
        or (isinstance(event, Backward) and event.seconds is None)
        or event.error is not None
    )
