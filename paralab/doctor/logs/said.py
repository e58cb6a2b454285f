"""What rules ask the logs: who said this, from which line of the user's code, and was it the
cause?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

from paralab.doctor import registry
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.logs.blame import Blame, Event, blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line
from paralab.doctor.logs.traceback import LIBRARIES, Frame
from paralab.doctor.registry import Check

WARNED = re.compile(r"(.+?):(\d+): \w*Warning: ")
_claimed: list[tuple[re.Pattern[str], Callable[[Logs], bool]]] = []


@dataclass(frozen=True)
class Said:
    """One message, whoever said it. `rank`: the only rank that said it, in a job of several."""

    match: re.Match[str]
    ranks: tuple[int, ...]
    rank: int | None
    file: str | None
    line: int | None
    code: str
    evidence: tuple[str, ...]

    @property
    def who(self) -> str:
        if not self.ranks:
            return "a process"
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]}"
        return "ranks " + ", ".join(map(str, self.ranks[:-1])) + f" and {self.ranks[-1]}"

    @property
    def at(self) -> str:
        """ " at train.py:12 (`loss.backward()`)", or nothing."""
        if self.file is None:
            return ""
        return f" at {self.file}:{self.line}" + (f" (`{self.code}`)" if self.code else "")

    def of_all(self) -> Said:
        """The same, with nobody named: the mistake lies between ranks, whoever spoke of it."""
        return replace(self, rank=None)

    def finding(
        self, id: str, severity: Severity, why: str, fix: str, rank: int | None = None
    ) -> Finding:
        named = self.rank if rank is None else rank
        return Finding(
            id, severity, why[:1].upper() + why[1:], fix, self.file, self.line, named, self.evidence
        )


def claims(pattern: str, only: Callable[[Logs], bool] = lambda logs: True) -> re.Pattern[str]:
    """A pattern of an error that has a rule of its own (in some logs `only`), so that the rule for
    all other exceptions leaves it alone."""
    compiled = re.compile(pattern, re.DOTALL)
    _claimed.append((compiled, only))
    return compiled


def is_claimed(logs: Logs, text: str) -> bool:
    return any(pattern.search(text) and only(logs) for pattern, only in _claimed)


def tells(*ids: str) -> Callable[[Check], Check]:
    """For a rule that finds out which of several entries it is: it stands in the list of rules once
    for each of them."""

    def register(check: Check) -> Check:
        for id in ids:
            registry.check(id, source="log")(partial(_only, id, check))
        return check

    return register


def _only(id: str, check: Check, logs: Logs) -> Iterator[Finding]:
    yield from (finding for finding in check(logs) if finding.id == id)


_blames: WeakKeyDictionary[Logs, Blame] = WeakKeyDictionary()


def blamed(logs: Logs) -> Blame:
    """Root and victims, worked out once per job."""
    if logs not in _blames:
        _blames[logs] = blame(logs)
    return _blames[logs]


def errors(logs: Logs, pattern: re.Pattern[str]) -> Said | None:
    """The exceptions that ended a rank of its own accord and say so."""
    found = [
        (event, match)
        for event in blamed(logs).roots
        if event.trace and (match := pattern.search(event.trace.text))
    ]
    return _said(logs, [(event, match) for event, match in found]) if found else None


def victims(logs: Logs, pattern: re.Pattern[str]) -> Said | None:
    """The same, of ranks that noticed another one's end or absence."""
    found = [
        (event, match)
        for event in blamed(logs).victims
        if event.trace and (match := pattern.search(event.trace.text))
    ]
    return _said(logs, found) if found else None


def _said(logs: Logs, found: list[tuple[Event, re.Match[str]]]) -> Said:
    event, match = found[0]
    assert event.trace is not None
    at: Frame | None = event.trace.where
    ranks = tuple(sorted({other.rank for other, _ in found if other.rank is not None}))
    evidence = tuple(line for other, _ in found[:3] for line in other.evidence())
    alone = len(found) == 1 and len(logs.ranks) > 1
    rank = event.rank if alone else None
    if at is None:
        return Said(match, ranks, rank, None, None, "", evidence)
    return Said(match, ranks, rank, at.file, at.line, at.code, evidence)


def lines(
    logs: Logs, pattern: re.Pattern[str], only: Callable[[Line], bool] = lambda line: True
) -> Said | None:
    """The lines that say so: warnings, mostly. Python writes before a warning the line of code that
    it is about."""
    found = [
        (line, match) for line in logs.lines if (match := pattern.search(line.text)) and only(line)
    ]
    if not found:
        return None
    ranks = tuple(sorted({line.rank for line, _ in found if line.rank is not None}))
    rank = (
        ranks[0]
        if len(ranks) == 1
        and len(logs.ranks) > 1
        and all(line.rank is not None for line, _ in found)
        else None
    )
    for line, _ in found:
        if (at := WARNED.match(line.text)) and not any(part in at[1] for part in LIBRARIES):
            break
    else:
        at = None
    seen = {line.text: line for line, _ in reversed(found)}
    evidence = tuple(map(str, sorted(seen.values(), key=logs.when)[:3]))
    return Said(
        found[0][1],
        ranks,
        rank,
        at[1].strip() if at else None,
        int(at[2]) if at else None,
        "",
        evidence,
    )
