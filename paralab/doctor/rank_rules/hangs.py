"""Ranks that do not meet: who did not come, where the others wait, and why. One cause at most: the
rest are its victims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from paralab.doctor.coming_apart import left_their_loops, made_different_calls, mixed_sizes
from paralab.doctor.finding import Finding
from paralab.doctor.missing import did_not_come, raised_alone, used_other_parameters
from paralab.doctor.observation import Observation
from paralab.doctor.registry import check

# In this order: tensors of different sizes can make any later line raise; a rank that raised
# explains why it did not come; ranks that came apart explain what failed later.
CAUSES: tuple[Callable[[Observation], Finding | None], ...] = (
    used_other_parameters,
    mixed_sizes,
    raised_alone,
    left_their_loops,
    made_different_calls,
    did_not_come,
)
ENTRIES = ("H01", "H02", "H03", "H04", "H06", "H07", "H08", "H10", "H11", "H12", "H13", "H14")


@lru_cache(maxsize=1)  # asked once for each entry
def cause(seen: Observation) -> Finding | None:
    if len(seen.ranks) < 2:
        return None
    return next((finding for find in CAUSES if (finding := find(seen)) is not None), None)


def _rule(entry: str) -> None:
    @check(entry, source="ranks")
    def rule(seen: Observation) -> Iterator[Finding]:
        found = cause(seen)
        if found is not None and found.id == entry:
            yield found


for _entry in ENTRIES:
    _rule(_entry)
