"""The catalog: every failure by id, and every check by source."""

import gc
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from paralab.doctor import failures
from paralab.doctor.registry import Entry, Finding, Source, entries, registered
from paralab.errors import UsageError

GROUPS = {
    "H": "Hangs, crashes, and misleading reports",
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


for _module in pkgutil.walk_packages(failures.__path__, f"{failures.__name__}."):
    importlib.import_module(_module.name)  # an import registers the entry and the checks
_ORDER = list(GROUPS)
ENTRIES = {id: entries[id] for id in sorted(entries, key=lambda id: (_ORDER.index(id[0]), id))}


def entry(id: str) -> Entry:
    """Return the entry with this id (`h1` means `H01`). Raise a usage error if there is none."""
    written = id.strip().upper()
    if len(written) == 2:
        written = f"{written[0]}0{written[1]}"
    if written in ENTRIES:
        return ENTRIES[written]
    if written[:1] in GROUPS:
        ids = [known for known in ENTRIES if known[0] == written[0]]
        raise UsageError(
            f"There is no entry {id!r}. Group {written[0]} has {', '.join(ids)}.",
            fix="one of these ids",
        )
    raise UsageError(
        f"There is no entry {id!r}. An id is one of {', '.join(GROUPS)}, followed by a number.",
        fix="paralab doctor --explain all",
    )


def checked_ids(source: Source) -> set[str]:
    ids = {id for ids in registered[source].values() for id in ids}
    if source in ("log", "ranks"):  # their checks also match every entry's messages
        kinds = ("raised",) if source == "ranks" else ("raised", "printed", "note")
        ids |= {id for id, e in ENTRIES.items() if any(m.kind in kinds for m in e.messages)}
    return ids


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, which would double the time of the checks but free little
    memory."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def apply(
    source: Source,
    subject: Any,
    ids: Collection[str] | None = None,
    on_error: Callable[[str, Exception], None] | None = None,
) -> list[Finding]:
    """Run the checks for one source, or those that may report one of these ids.

    Among findings with the same id, fix, and line, keep the most certain. If a check raises,
    `on_error` is called with its ids and name, and the other checks still run.
    """
    all_findings: list[Finding] = []
    with without_garbage_collection():
        for check, reported in registered[source].items():
            if ids is not None and not set(reported) & set(ids):
                continue
            try:
                findings = check(subject) or ()
                all_findings += [findings] if isinstance(findings, Finding) else findings
            except Exception as error:
                if on_error is None or isinstance(error, UsageError):
                    raise
                on_error(f"{'/'.join(reported)} {check.__name__}", error)
    best: dict[object, Finding] = {}
    for each in sorted(all_findings, key=lambda one: one.uncertainty):
        place = (each.id, each.fix, each.file, each.line, each.rank) if each.line else each
        best.setdefault(place, each)
    kept = set(map(id, best.values()))
    return [each for each in all_findings if id(each) in kept and (ids is None or each.id in ids)]
