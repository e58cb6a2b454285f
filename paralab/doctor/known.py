"""The whole catalogue by id: 90 ways in which parallel training goes wrong, in the order in which one meets them; then what
wastes time, and what is wrong with a machine."""

from __future__ import annotations

from paralab.doctor.catalogue import (
    accumulation,
    checkpoints,
    data,
    dataparallel,
    hangs,
    launch,
    machine,
    pipeline,
    precision,
    reports,
    semantics,
    waste,
)
from paralab.doctor.entry import Entry
from paralab.errors import UsageError

GROUPS = {
    "H": "Hangs, crashes and misleading reports",
    "L": "Launch and environment",
    "S": "What DDP does and does not do",
    "T": "Data",
    "G": "Gradient accumulation",
    "A": "Mixed precision",
    "D": "nn.DataParallel",
    "P": "Pipelines",
    "C": "Checkpoints",
    "W": "Waste",
    "M": "Machines",
}
_PARTS = (hangs, reports, launch, semantics, data, accumulation, precision, dataparallel, pipeline, checkpoints, waste, machine)
ENTRIES: dict[str, Entry] = {
    entry.id: entry
    for entry in sorted((entry for part in _PARTS for entry in part.ENTRIES), key=lambda e: (list(GROUPS).index(e.id[0]), e.id))
}


def entry(id: str) -> Entry:
    """The entry, whichever way its id is written (h1, H01); an unknown id is the user's mistake."""
    written = id.strip().upper()
    if len(written) == 2:
        written = f"{written[0]}0{written[1]}"
    if written in ENTRIES:
        return ENTRIES[written]
    if written[:1] in GROUPS:
        ids = [known for known in ENTRIES if known[0] == written[0]]
        raise UsageError(f"There is no entry {id!r}; those of {GROUPS[written[0]]!r} are {', '.join(ids)}.", cure="one of them")
    raise UsageError(
        f"There is no entry {id!r}; an id is one of {', '.join(GROUPS)} and a number.", cure="paralab doctor --explain all"
    )
