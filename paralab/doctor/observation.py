"""What observed ranks wrote down, as the rules read it.

An observation is a folder. Every rank writes `rank<N>.jsonl` (`rank<N>.<attempt>.jsonl` after a
restart by torchrun; the last attempt counts), one event per line (`doctor.events` is the schema),
and `rank<N>.now`: the operations that are open at this moment, which stay readable when the rank
hangs or was killed. Of long runs whole steps are kept (the first 64, then one in 8 or rarer, as
each rank can afford it: here they are those that all ranks kept); `rank<N>.recent` holds the last
512 operations of the other, light steps, and those that are open, as numbers of calls that the
first file explains. When asked, a rank also writes `rank<N>.json`: its stacks and its last
collectives.

    observation = Observation.read(folder)
    for rank in observation.ranks:
        for step in rank.of(Step): ...            # typed, in the order in which they began
        rank.events                               # all kinds, in that order
        rank.doing                                # what it is in now, or was in when it was last heard of; outermost first
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from paralab.analyse.stack_dumps import StackDump
from paralab.doctor.events import (
    Amp,
    Autocast,
    Backward,
    Batch,
    Clip,
    Collective,
    Destroy,
    End,
    Event,
    Exit,
    Forward,
    Group,
    Init,
    Loss,
    Off,
    Pipeline,
    Raised,
    Scheduled,
    Seed,
    Start,
    Step,
    Wrap,
    ZeroGrad,
    typed,
)
from paralab.doctor.place import Place, Site
from paralab.machine.processes import state_of
from paralab.record.open_operations import read_open_operations
from paralab.record.reader import WatchedTail
from paralab.record.ring_log import OPEN, ROWS, Row, read_ring_log

Kind = TypeVar("Kind", bound=Event)
Numbered = (
    Collective | Forward | Backward | Wrap
)  # operations that make collectives, with their numbers in `seq`
REPEATED = (
    Batch,
    Forward,
    Loss,
    ZeroGrad,
    Backward,
    Step,
    Collective,
    Amp,
    Autocast,
    Clip,
    Scheduled,
    Seed,
    Pipeline,
)
WAITING = (
    Collective,
    Forward,
    Backward,
    Wrap,
    Init,
    Group,
    Destroy,
    Pipeline,
)  # operations that need the other ranks


@dataclass(frozen=True, eq=False)
class RankSeen:
    """One rank. `doing`: operations that had begun and were not over when the folder was read,
    outermost first. `lives`: its process is there (None: it runs on another machine). `progress`:
    grows with every event and every operation begun."""

    rank: int
    start: Start
    events: tuple[Event, ...]
    doing: tuple[Event, ...]
    lives: bool | None
    state: (
        str | None
    )  # of its process, one letter as `ps` shows it; None: gone, or not of this machine
    progress: int
    recent: tuple[
        Event, ...
    ] = ()  # of the last steps that are not among `events`: without what is minor
    settled: bool = (
        True  # it has stopped where `doing` says (it hangs, or is over); False: it is on its way
    )
    said: StackDump | None = None  # its stacks and collectives, once asked

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Looked for once: rules ask again and again."""
        if kind not in self._by_kind:
            self._by_kind[kind] = [event for event in self.events if isinstance(event, kind)]
        return self._by_kind[kind]

    @cached_property
    def _by_kind(self) -> dict[type[Event], list[Any]]:
        return {}

    def last(self, kind: type[Kind]) -> Kind | None:
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)

    @cached_property
    def story(self) -> list[Event]:
        """`events` and `recent`: for hangs, which need what came last. Rules that look at whole
        steps take `events`."""
        return (
            sorted([*self.events, *self.recent], key=lambda event: event.t)
            if self.recent
            else list(self.events)
        )

    @cached_property
    def steps(self) -> list[Step]:
        return self.of(Step)

    @property
    def made(self) -> int:
        """Optimizer steps made."""
        return max((event.step for event in (*self.story, *self.doing)), default=0)

    @property
    def raised(self) -> Raised | None:
        """The exception that ended it."""
        return self.last(Raised)

    @property
    def ended(self) -> bool:
        """It has come to its end, or its process is gone."""
        return self.last(End) is not None or self.left is not None or self.lives is False

    @property
    def came_to_its_end(self) -> bool:
        """By itself: to the end of the program, or by an exit."""
        return self.last(End) is not None or self.left is not None

    @property
    def left(self) -> Exit | None:
        return self.last(Exit)

    @property
    def is_blind(self) -> bool:
        """The observation of this rank failed: what is missing from its events has not necessarily
        not happened."""
        return self.last(Off) is not None

    @property
    def last_place(self) -> Place | None:
        """The user's line where it was last heard of."""
        for event in reversed((*self.story, *self.doing)):
            if event.site:
                return event.site.place
        return None

    @cached_property
    def collectives(self) -> dict[str, dict[int, Numbered]]:
        """group -> number -> the operation that made that collective, the innermost; where a rank
        has stopped, also those that are open, with the number they wait in."""
        found: dict[str, dict[int, Numbered]] = {}
        for event in sorted(
            (*self.story, *(self.doing if self.settled else ())), key=lambda event: event.t
        ):
            if not isinstance(event, Numbered) or not event.seq:
                continue
            group = event.group if isinstance(event, Collective) else "0"
            first, last = event.seq
            for number in range(first, last + 1):
                found.setdefault(group or "0", {})[number] = event
        return found


@dataclass(frozen=True, eq=False)
class Observation:
    """`world`: how many ranks there should be. `over`: the command has ended, with `exit_code`.
    Rules are also asked while it runs: then one that argues from something missing (never called,
    too few) must wait until `over`. `stalled_seconds`: for how long no rank had made progress when
    the rules were asked, None where that is not the question."""

    folder: Path
    ranks: list[RankSeen]
    world: int
    over: bool = True
    exit_code: int | None = None
    stalled_seconds: float | None = None
    ended_by_us: bool = False  # a trial was over, or it hung for good
    notes: tuple[str, ...] = ()  # what kept a process from being observed

    @property
    def settled(self) -> bool:
        """Nothing more is to come soon: it is over, or hangs."""
        return self.over or self.stalled_seconds is not None

    @classmethod
    def read(cls, folder: Path) -> Observation:
        return Reader(folder).read()

    def rank(self, number: int) -> RankSeen | None:
        return next((rank for rank in self.ranks if rank.rank == number), None)

    def pairs(self, kind: type[Kind]) -> list[tuple[RankSeen, list[Kind]]]:
        """Every rank with its events of one kind."""
        return [(rank, rank.of(kind)) for rank in self.ranks]


@dataclass
class _File:
    """One rank's files as they grow. `failed`: operations of light steps that raised. `kept`: the
    steps that were watched."""

    path: Path
    tail: WatchedTail
    sites: dict[int, Site] = field(default_factory=dict)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    failed: list[Event] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)

    def grow(self) -> None:
        self.rows = read_ring_log(self.path.with_suffix(".recent"))
        new = self.tail.new()
        for raw in new:
            if raw["event"] == "site":
                self.sites[raw["id"]] = Site(tuple(Place(*place) for place in raw["stack"]))
            elif raw["event"] == "call":
                self.calls[raw["id"]] = raw
            elif raw["event"] == "failed":
                self.failed += self._typed(
                    Row(0, raw["call"], raw["t"], raw["step"], raw["first"], OPEN), {}, raw
                )
            elif event := typed(raw, self.sites):
                self.events.append(event)
                if isinstance(event, Step):
                    self.kept.add(event.step)
        if new:
            self.events.sort(key=lambda event: event.t)

    def light(self, is_open: bool) -> list[Event]:
        """The last operations of light steps: those that are over, or those that the rank is in."""
        rows = [row for row in self.rows if (row.seconds == OPEN if is_open else row.seconds >= 0)]
        made = {} if is_open else self._collectives_made()
        return [event for row in rows for event in self._typed(row, made)]

    def _collectives_made(self) -> dict[int, int]:
        """row -> how many collectives it made: up to the next one's first; where none follows soon,
        as many as the last time."""
        made: dict[int, int] = {}
        usual: dict[int, int] = {}  # call -> how many
        following: dict[str, Row] = {}  # group -> the next row that counts in it
        for row in reversed(self.rows):
            call = self.calls.get(row.call, {})
            if not row.first or call.get("of") == "batch":
                continue
            group = call.get("group") or "0"
            after = following.get(group)
            if after is not None and after.step <= row.step + 1:
                made[row.number] = usual[row.call] = after.first - row.first
            following[group] = row
        return {row.number: made.get(row.number, usual.get(row.call, 1)) for row in self.rows}

    def _typed(
        self, row: Row, made: dict[int, int], more: dict[str, Any] | None = None
    ) -> list[Event]:
        call = self.calls.get(row.call)
        if call is None:
            return []  # a file that was cut off
        over = row.seconds >= 0
        raw = {
            **call,
            "event": call["of"],
            "t": row.t,
            "step": row.step,
            "seconds": row.seconds if over else None,
        }
        if call["of"] == "batch":
            raw.update(batch=row.first, wait=row.seconds, seconds=None)
        elif row.first:
            raw["seq"] = [
                row.first,
                row.first - 1 + made.get(row.number, call["of"] == "collective"),
            ]
        event = typed(
            {**raw, **({"seconds": more["seconds"], "error": more["error"]} if more else {})},
            self.sites,
        )
        return [] if event is None else [event]

    @property
    def made(self) -> int:
        return max(
            [0, *(event.step for event in self.events), *(row.step for row in self.rows[-1:])]
        )


def _not_shared(files: Collection[_File]) -> set[int]:
    """Steps that one rank has kept and another one, which has made them, has not."""
    kept = [file for file in files if file.kept]
    if not kept or all(file.kept == kept[0].kept for file in kept):
        return set()
    made = [(file, file.made) for file in kept]
    return {
        step
        for file in kept
        for step in file.kept
        if any(step not in other.kept and step <= last for other, last in made)
    }


class Reader:
    """Reads a folder again and again, each time only what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, _File] = {}

    def read(
        self,
        over: bool = True,
        exit_code: int | None = None,
        stalled_seconds: float | None = None,
        ended_by_us: bool = False,
    ) -> Observation:
        for path in self.folder.glob("rank[0-9]*.jsonl"):
            self._files.setdefault(path, _File(path, WatchedTail(path)))
        latest: dict[int, _File] = {}
        for path in sorted(self._files, key=_numbered):
            self._files[path].grow()
            if self._files[path].events:
                latest[_numbered(path)[0]] = self._files[path]
        settled, apart = over or stalled_seconds is not None, _not_shared(latest.values())
        ranks = [_seen(number, file, settled, apart) for number, file in sorted(latest.items())]
        world = max((rank.start.world for rank in ranks), default=0)
        notes = tuple(path.read_text().strip() for path in sorted(self.folder.glob("off-*.txt")))
        return Observation(
            self.folder,
            ranks,
            max(world, len(ranks)),
            over,
            exit_code,
            stalled_seconds,
            ended_by_us,
            notes,
        )

    def ask(self, seconds: float = 1.0) -> None:
        """Let every rank that lives say where it is, and wait a moment for the answers."""
        asked = time.time()
        (self.folder / "ask").touch()
        os.utime(self.folder / "ask", (asked, asked))
        living = [
            path
            for path, file in self._files.items()
            if file.events and _life(_start(file))[0] is not False
        ]
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(_answered(path, asked) for path in living):
            time.sleep(0.05)


def _answered(path: Path, asked: float) -> bool:
    answer = path.with_suffix(".json")
    return answer.exists() and answer.stat().st_mtime >= asked - 0.01


def _seen(number: int, file: _File, settled: bool, apart: set[int]) -> RankSeen:
    count, doing = read_open_operations(file.path.with_suffix(".now"))
    open_ = [event for raw in doing if (event := typed(raw, file.sites)) is not None]
    open_ += [event for event in file.light(is_open=True) if isinstance(event, WAITING)]
    said = (
        StackDump.read(file.path.parent, number)
        if file.path.with_suffix(".json").exists()
        else None
    )
    events = [event for event in file.events if not _is_of(event, apart)] if apart else file.events
    late = (
        [
            *_recent(file),
            *file.failed,
            *(event for event in file.events if apart and _is_of(event, apart)),
        ]
        if settled
        else []
    )
    start, progress = (
        _start(file),
        count + len(file.events) + sum(row.number for row in file.rows[-1:]),
    )
    open_.sort(key=lambda event: event.t)
    lives, state = _life(start)
    return RankSeen(
        number,
        start,
        tuple(events),
        tuple(open_),
        lives,
        state,
        progress,
        tuple(late),
        settled,
        said,
    )


def _is_of(event: Event, steps: set[int]) -> bool:
    """It is one that every step repeats, of one of these steps."""
    return isinstance(event, REPEATED) and event.step + (not isinstance(event, Step)) in steps


def _recent(file: _File) -> list[Event]:
    """Of light steps: the last ones, from the beginning of a step."""
    cut = file.rows[0].step if len(file.rows) == ROWS else -1
    return [event for event in file.light(is_open=False) if event.step > cut]


def _start(file: _File) -> Start:
    return next((event for event in file.events if isinstance(event, Start)), Start())


def _life(start: Start) -> tuple[bool | None, str | None]:
    """(whether its process is there, its state); None if it runs on another machine."""
    if start.host != socket.gethostname():
        return None, None
    state = state_of(start.pid)
    return state not in (None, "Z", "X"), state


def _numbered(path: Path) -> tuple[int, int]:
    """(rank, attempt): rank0.jsonl is the first attempt of rank 0, rank0.2.jsonl the third."""
    rank, _, attempt = path.stem.removeprefix("rank").partition(".")
    return int(rank), int(attempt or 0)


def as_json(event: Event) -> dict[str, Any]:
    """For the evidence of a finding."""
    return {name: value for name, value in vars(event).items() if value not in (None, [], {})}


def waits_since(rank: RankSeen) -> float | None:
    """Since when (Unix seconds) a rank that lives is inside something that needs the others; None:
    it is not."""
    inner = rank.doing[-1] if rank.doing else None
    return (
        inner.t
        if inner is not None and rank.lives is not False and isinstance(inner, WAITING)
        else None
    )
