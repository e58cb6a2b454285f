"""Find the failure that a message belongs to. Logs, watched ranks, and run folders all use the
patterns in the catalog's entries."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from paralab.doctor.logs.blame import Event, blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line
from paralab.doctor.logs.traceback import LIBRARIES, Frame
from paralab.doctor.registry import Entry, Finding, Message, entries

LAST = "H11"  # explains exceptions that do not have their own entry
EMPTY = re.compile(r" \( *\)|(?<=\() +")  # what an unmatched named group leaves in the text
WARNED = re.compile(r"(.+?):(\d+): \w*Warning: ")


@dataclass(frozen=True)
class MessageMatch:
    entry: Entry
    message: Message
    match: re.Match[str]

    def finding(
        self,
        ranks: Iterable[int | None],
        at: Frame | None,
        rank: int | None,
        evidence: tuple[str, ...],
    ) -> Finding:
        """Turn a message into a finding. `rank` is the rank that printed it, if only one did."""
        words = {name: text or "" for name, text in self.match.groupdict().items()}
        who = named(ranks)
        words |= {"who": who[0].lower() + who[1:], "at": f" at {at}" if at else ""}
        why, fix = self.message.why.format_map(words), self.message.fix.format_map(words)
        return Finding(
            self.entry.id,
            self.message.severity,
            re.sub("  +", " ", EMPTY.sub("", why[0].upper() + why[1:])),
            fix,
            at.file if at else None,
            at.line if at else None,
            rank if self.message.blames else None,
            evidence,
        )


@cache
def _patterns(kinds: tuple[str, ...]) -> list[tuple[Entry, Message, re.Pattern[str]]]:
    return [
        (entry, message, re.compile(message.pattern, re.DOTALL))
        for entry in sorted(entries.values(), key=lambda entry: entry.id == LAST)
        for message in entry.messages
        if message.kind in kinds
    ]


def find_message(
    text: str, kinds: tuple[str, ...] = ("raised", "printed", "note"), lines: Iterable[Line] = ()
) -> MessageMatch | None:
    """Return the first catalog message in a text. Prefer causes to notes, which torch may print
    after an exception. `lines` holds all lines of the log."""
    for entry, message, pattern in sorted(_patterns(kinds), key=lambda one: one[1].kind == "note"):
        if (match := pattern.search(text)) and (
            not message.beside or any(re.search(message.beside, line.text) for line in lines)
        ):
            return MessageMatch(entry, message, match)
    return None


def named(ranks: Iterable[int | None]) -> str:
    """Return "Rank 1", "Ranks 0 and 2", or "A process"."""
    known = sorted({rank for rank in ranks if rank is not None})
    if not known:
        return "A process"
    if len(known) == 1:
        return f"Rank {known[0]}"
    return f"Ranks {', '.join(map(str, known[:-1]))} and {known[-1]}"


@lru_cache(maxsize=4)
def printed_messages(logs: Logs) -> dict[Message, list[tuple[MessageMatch, Line]]]:
    """Return the catalog messages in lines outside tracebacks, the most specific first."""
    found: dict[Message, list[tuple[MessageMatch, Line]]] = defaultdict(list)
    for line in logs.lines:
        if known := find_message(line.text, ("printed", "note"), logs.lines):
            found[known.message].append((known, line))
    return {m: found[m] for _, m, _ in _patterns(("printed", "note")) if m in found}


def explains(logs: Logs, event: Event | None = None) -> bool:
    """Return whether the catalog explains this event's exception or, without an event, any line of
    a failed job."""
    if event is not None:
        return bool(event.trace and find_message(event.trace.text, lines=logs.lines))
    return any(message.kind == "printed" for message in printed_messages(logs))


def messages_in(logs: Logs) -> Iterator[Finding]:
    """Yield the catalog's findings for the exceptions that killed the job and for other lines."""
    events = blame(logs).roots or blame(logs).victims
    raised: dict[Message, list[tuple[MessageMatch, Event]]] = defaultdict(list)
    for event in events:
        if event.trace and (known := find_message(event.trace.text, lines=logs.lines)):
            raised[known.message].append((known, event))
    for message, same in raised.items():
        if message.why:
            known, first = same[0]
            only = len(same) == 1 and len(logs.ranks) > 1 and first.role == "root"
            evidence = tuple(line for _, other in same[:3] for line in other.evidence())
            ranks = [other.rank for _, other in same]
            yield known.finding(ranks, first.at, first.rank if only else None, evidence)

    printed = printed_messages(logs)
    done = {same[0][0].entry.id for same in raised.values()}
    failed = bool(events) or any(m.why and m.severity == "error" for m in printed)
    for message, lines in printed.items():
        id = lines[0][0].entry.id
        if message.why and (message.kind == "printed" or not failed) and id not in done:
            done.add(id)
            yield _of_lines(logs, lines)


def _of_lines(logs: Logs, matches: list[tuple[MessageMatch, Line]]) -> Finding:
    """Report a message. Before a warning, Python prints the line of code that caused it."""
    known = matches[0][0]
    ranks = {line.rank for _, line in matches}
    if process := known.match.groupdict().get("pid"):
        ranks = {exit_.rank for exit_ in logs.exits if exit_.pid == int(process)} or ranks
    at = None
    for _, line in matches:
        warned = WARNED.match(line.text)
        if warned and not any(part in warned[1] for part in LIBRARIES):
            at = Frame(warned[1].strip(), int(warned[2]), "")
            break
    distinct = {line.text: line for _, line in reversed(matches)}
    evidence = tuple(map(str, sorted(distinct.values(), key=logs.when)[:3]))
    only = next(iter(ranks)) if len(ranks) == 1 and len(logs.ranks) > 1 else None
    return known.finding(ranks, at, only, evidence)
