"""Find how far each rank got in each pass over a DataLoader, and which collectives it called."""

from dataclasses import dataclass, field

from paralab.doctor.events import Backward, Batch, Collective, Epoch, Forward, Loader
from paralab.doctor.observation import Numbered, WatchedRank
from paralab.doctor.source_context import is_outside


@dataclass
class Pass:
    """One pass over a loader.

    batches     how many batches the rank read
    reached     the last batch in which the rank ran a collective
    exhausted   the event that marks the end of the loader, or None
    over        whether the rank left the loop, early or at the end of the loader
    """

    loader: Loader
    batches: int = 0
    reached: int = 0
    collectives: list[Numbered] = field(default_factory=list)
    exhausted: Epoch | None = None
    over: bool = False

    @property
    def last_collective(self) -> Numbered | None:
        return self.collectives[-1] if self.collectives else None


def passes(rank: WatchedRank) -> dict[tuple[int, int], Pass]:
    """Map (loader, epoch) to what this rank did in this pass."""
    by_pass: dict[tuple[int, int], Pass] = {}
    current: Pass | None = None
    for event in (*rank.story, *rank.doing):
        if isinstance(event, Loader):
            for (loader, _), earlier in by_pass.items():
                earlier.over = earlier.over or loader == event.loader
            current = by_pass[event.loader, event.epoch] = Pass(event)
        elif isinstance(event, Batch) and (event.loader, event.epoch) in by_pass:
            current = by_pass[event.loader, event.epoch]
            current.batches = event.batch
        elif isinstance(event, Epoch) and (event.loader, event.epoch) in by_pass:
            ended = by_pass[event.loader, event.epoch]
            ended.exhausted, ended.over = event, True
        elif current is None or current.over:
            continue
        elif isinstance(event, Numbered) and _needs_ranks(event):
            current.over = _is_left(current, event)
            if current.over or (event in rank.doing and not rank.settled):
                continue  # an open operation may still finish
            current.reached = current.batches
            current.collectives.append(event)
    for each in by_pass.values() if rank.reached_end else ():
        each.over = True
    return by_pass


def _is_left(current: Pass, event: Numbered) -> bool:
    """Return whether this collective is outside the loop but the pass's first one was inside it."""
    loop = current.loader.site
    inside = current.collectives[0].site if current.collectives else None
    if loop is None or inside is None or event.site is None or event.site is inside:
        return False
    return is_outside(event.site, loop) and not is_outside(inside, loop)


def _needs_ranks(event: Numbered) -> bool:
    """Return whether the operation ran collectives, is inside one, or failed in one."""
    if not isinstance(event, (Backward, Forward, Collective)) or not event.seq:
        return False
    is_open = isinstance(event, Backward) and event.seconds is None
    return event.seq[1] >= event.seq[0] or is_open or event.error is not None
