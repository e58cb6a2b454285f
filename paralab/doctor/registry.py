"""What a failure's file registers: its entry in the catalog, and checks for one or more sources.

ENTRY = Entry(id="H03", title=…, …)

@check("H03", source="script")
def partial_collective(script: Script) -> Iterator[Finding]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from paralab.doctor.finding import Finding

# script: doctor.static.script.Script; ranks: doctor.observation; log: doctor.logs;
# run: a run folder, doctor.recorded; machine: doctor.preflight
Source = Literal["script", "ranks", "log", "run", "machine"]
Check = Callable[[Any], Iterable[Finding]]
registered: dict[Source, dict[Check, tuple[str, ...]]] = {
    "script": {},
    "ranks": {},
    "log": {},
    "run": {},
    "machine": {},
}


@dataclass(frozen=True)
class Entry:
    """One way in which parallel training goes wrong. `wrong` and `right` differ only in the fix."""

    id: str
    title: str
    symptom: str  # what the user sees
    cause: str
    fix: str
    wrong: str
    right: str
    sources: tuple[str, ...] = ()  # owner/repository#number
    silent: bool = False  # no other tool reports it on a plain PyTorch script
    limits: str | None = None  # what no check here can see, and why


def check(*ids: str, source: Source) -> Callable[[Check], Check]:
    """Register a check for a source. It may report any of these ids."""

    def register(function: Check) -> Check:
        registered[source][function] = ids
        return function

    return register
