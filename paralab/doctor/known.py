"""The whole catalogue by id: the ways in which parallel training goes wrong, in the order in which
one meets them.

A module of the catalogue that is added is part of it."""

from __future__ import annotations

import importlib
import pkgutil

from paralab.doctor import catalogue
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


def _all() -> dict[str, Entry]:
    modules = [
        importlib.import_module(f"{catalogue.__name__}.{found.name}")
        for found in pkgutil.iter_modules(catalogue.__path__)
    ]
    entries: list[Entry] = [entry for module in modules for entry in module.ENTRIES]
    by_id = {
        entry.id: entry
        for entry in sorted(entries, key=lambda entry: (list(GROUPS).index(entry.id[0]), entry.id))
    }
    assert len(by_id) == len(entries), "two entries have the same id"
    return by_id


ENTRIES = _all()


def entry(id: str) -> Entry:
    """The entry, whichever way its id is written (h1, H01); an unknown id is the user's mistake."""
    written = id.strip().upper()
    if len(written) == 2:
        written = f"{written[0]}0{written[1]}"
    if written in ENTRIES:
        return ENTRIES[written]
    if written[:1] in GROUPS:
        ids = [known for known in ENTRIES if known[0] == written[0]]
        raise UsageError(
            f"There is no entry {id!r}; those of {GROUPS[written[0]]!r} are {', '.join(ids)}.",
            fix="one of them",
        )
    raise UsageError(
        f"There is no entry {id!r}; an id is one of {', '.join(GROUPS)} and a number.",
        fix="paralab doctor --explain all",
    )
