"""Find what each rank did with each pass over a loader."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from paralab.doctor.events import Backward, Batch, Epoch, Forward, Loader
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.place import Place
from paralab.doctor.rank_checks import place_of


@dataclass
class Use:
    """One pass over a loader: its batches, and how the rank used them."""

    loader: Loader
    batches: list[Batch] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    backwards: int = 0
    end: Epoch | None = None

    @property
    def trains(self) -> bool:
        return self.backwards > 0

    @property
    def evaluates(self) -> bool:
        return not self.backwards and any(not forward.grad for forward in self.forwards)

    @property
    def is_split_later(self) -> bool:
        """Whether the rank passes only a part of each batch to the model."""
        given = sum(forward.size or 0 for forward in self.forwards)
        taken = sum(batch.size or 0 for batch in self.batches)
        return 0 < given <= 0.75 * taken

    @property
    def rows(self) -> list[list[int]]:
        """Checksums of the rows of the inspected batches."""
        return [batch.rows for batch in self.batches if batch.rows]

    @property
    def place(self) -> Place | None:
        return self.loader.made_at or place_of(self.loader)


@lru_cache(maxsize=64)  # several checks use this
def uses(rank: WatchedRank) -> dict[tuple[int, int], Use]:
    """Return the use of each (loader, pass). A nested pass (validation) keeps its own batches."""
    by_pass: dict[tuple[int, int], Use] = {}
    open_: list[Use] = []
    for event in rank.events:
        if isinstance(event, Loader):
            by_pass[event.loader, event.epoch] = use = Use(event)
            open_ = [other for other in open_ if other.loader.loader != event.loader] + [use]
        elif isinstance(event, Batch) and (event.loader, event.epoch) in by_pass:
            use = by_pass[event.loader, event.epoch]
            use.batches.append(event)
            open_ = [other for other in open_ if other is not use] + [use]
        elif isinstance(event, Epoch) and (event.loader, event.epoch) in by_pass:
            use = by_pass[event.loader, event.epoch]
            use.end = event
            open_ = [other for other in open_ if other is not use]
        elif isinstance(event, Forward) and open_:
            open_[-1].forwards.append(event)
        elif isinstance(event, Backward) and open_:
            open_[-1].backwards += 1
    return by_pass


def common_uses(seen: Observation) -> Iterator[tuple[int, list[Use]]]:
    """Yield a loader's number and every rank's use of one pass over it."""
    tables = [uses(rank) for rank in seen.ranks]
    for key in tables[0] if len(tables) > 1 else ():
        others = [table[key] for table in tables if key in table]
        if len(others) == len(tables):
            yield key[0], others
