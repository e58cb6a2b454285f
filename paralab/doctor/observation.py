"""The events of watched ranks, in the form that checks use.

An observation is a folder. Every rank writes these files (after a restart by torchrun,
`rank<N>.<attempt>` instead of `rank<N>`; only the last attempt is read):

    rank<N>.jsonl    one event per line (`doctor.events` is the schema). A long run keeps whole
                     steps: the first 64, then one in 8 or fewer, depending on their cost. Checks
                     get only the steps that all ranks kept.
    rank<N>.now      the open operations; still readable if the rank hangs or was killed
    rank<N>.recent   the last 512 operations of the other (light) steps, including open ones. It
                     refers to calls by number, and rank<N>.jsonl describes each call
    rank<N>.json     stacks and last collectives, on request

    observation = Observation.read(folder)
    for rank in observation.ranks:
        for step in rank.of(Step): ...   # typed, in the order in which they began
        rank.events                      # all kinds, in that order
        rank.doing                       # open operations, outermost first
"""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from paralab.analyse.stack_dumps import StackDump
from paralab.doctor import events as kinds
from paralab.doctor.events import (
    Backward,
    Collective,
    End,
    Event,
    Exit,
    Forward,
    Off,
    Raised,
    Start,
    Step,
    Wrap,
    typed,
)
from paralab.doctor.place import Place, Site
from paralab.machine.processes import state_of
from paralab.record.operations import OPEN, ROWS, Row, read_open_operations, read_ring_log
from paralab.record.reader import Tail, parse_watched

Kind = TypeVar("Kind", bound=Event)
# Operations that run collectives; `seq` has the numbers of those collectives.
Numbered = Collective | Forward | Backward | Wrap
# Operations that need other ranks.
WAITING = (
    *(Collective, Forward, Backward, Wrap),
    *(kinds.Init, kinds.Group, kinds.Destroy, kinds.Pipeline),
)
# Events that recur in every step.
REPEATED = (
    *(kinds.Batch, Forward, kinds.Loss, kinds.ZeroGrad, Backward, Step, Collective, kinds.Amp),
    *(kinds.Autocast, kinds.Clip, kinds.Scheduled, kinds.Seed, kinds.Pipeline),
)


@dataclass(frozen=True, eq=False)
class WatchedRank:
    """One watched rank.

    doing     operations that were open when the folder was read, outermost first
    lives     whether its process exists; None if it runs on another machine
    state     the state letter that `ps` shows; None if the process is gone or on another machine
    progress  grows with every event and every operation that begins
    recent    the last light steps, without minor events
    settled   whether the job hangs or has ended, so that `doing` is final
    answer    the rank's stacks and collectives, if requested
    """

    rank: int
    start: Start
    events: tuple[Event, ...]
    doing: tuple[Event, ...]
    lives: bool | None
    state: str | None
    progress: int
    recent: tuple[Event, ...] = ()
    settled: bool = True
    answer: StackDump | None = None

    @cached_property
    def _by_kind(self) -> dict[type[Event], list[Any]]:
        events: dict[type[Event], list[Any]] = defaultdict(list)
        for event in self.events:
            events[type(event)].append(event)
        return events

    def of(self, kind: type[Kind]) -> list[Kind]:
        return self._by_kind[kind]

    def last(self, kind: type[Kind]) -> Kind | None:
        found = self.of(kind)
        return found[-1] if found else None

    @cached_property
    def story(self) -> list[Event]:
        """Return `events` and `recent` chronologically, for checks of hangs. Other checks need
        whole steps."""
        if not self.recent:
            return list(self.events)
        return sorted([*self.events, *self.recent], key=lambda event: event.t)

    @cached_property
    def steps(self) -> list[Step]:
        return self.of(Step)

    @property
    def made(self) -> int:
        return max((event.step for event in (*self.story, *self.doing)), default=0)

    @property
    def raised(self) -> Raised | None:
        return self.last(Raised)

    @property
    def ended(self) -> bool:
        return self.reached_end or self.lives is False

    @property
    def reached_end(self) -> bool:
        return self.last(End) is not None or self.last(Exit) is not None

    @property
    def left(self) -> Exit | None:
        """Return the exit that the program called, unless an exception ended it. Skip the exit that
        multiprocessing adds after a sys.exit."""
        exits = [] if self.raised else self.of(Exit)
        chosen = [one for one in exits if one.site and one.call != "os._exit"] or exits
        return chosen[-1] if chosen else None

    @property
    def is_blind(self) -> bool:
        """Return whether watching failed. If so, operations may be missing from the events."""
        return self.last(Off) is not None

    @property
    def last_place(self) -> Place | None:
        events = reversed((*self.story, *self.doing))
        return next((event.site.place for event in events if event.site), None)

    @property
    def waits_since(self) -> float | None:
        """Return when (Unix seconds) the rank entered an operation that needs other ranks. Return
        None if it is not in such an operation, or if its process is gone."""
        inner = self.doing[-1] if self.doing else None
        return inner.t if self.lives is not False and isinstance(inner, WAITING) else None

    @cached_property
    def collectives(self) -> dict[str, dict[int, Numbered]]:
        """Map each collective, by group and number, to the innermost operation that ran it. Include
        open operations if the rank is settled."""
        by_group: dict[str, dict[int, Numbered]] = {}
        open_ = self.doing if self.settled else ()
        for event in sorted((*self.story, *open_), key=lambda event: event.t):
            if isinstance(event, Numbered) and event.seq:
                group = event.group if isinstance(event, Collective) else None
                numbers = range(event.seq[0], event.seq[1] + 1)
                by_group.setdefault(group or "0", {}).update(dict.fromkeys(numbers, event))
        return by_group


@dataclass(frozen=True, eq=False)
class Observation:
    """All watched ranks.

    world            how many ranks there should be
    over             whether the command has ended. Checks also run earlier, so a check that relies
                     on a missing event must wait until `over`
    stalled_seconds  how long no rank has made progress; None if not measured
    ended_by_us      whether we stopped the command: its trial was over, or it hung for good
    notes            why some processes could not be watched
    """

    folder: Path
    ranks: list[WatchedRank]
    world: int
    over: bool = True
    exit_code: int | None = None
    stalled_seconds: float | None = None
    ended_by_us: bool = False
    notes: tuple[str, ...] = ()

    @property
    def settled(self) -> bool:
        """Return whether the job has ended or hangs, so that no event is about to arrive."""
        return self.over or self.stalled_seconds is not None

    @classmethod
    def read(cls, folder: Path) -> "Observation":
        return Reader(folder).read()

    def rank(self, number: int) -> WatchedRank | None:
        return next((rank for rank in self.ranks if rank.rank == number), None)


@dataclass
class _File:
    """One rank's files as they grow. `failed` lists operations of light steps that raised an
    exception. `kept` holds the steps that were watched."""

    path: Path
    tail: Tail[dict[str, Any]]
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
                row = Row(0, raw["call"], raw["t"], raw["step"], raw["first"], OPEN)
                more = {"seconds": raw["seconds"], "error": raw["error"]}
                self.failed += self._typed(row, {}, more)
            elif event := typed(raw, self.sites):
                self.events.append(event)
                if isinstance(event, Step):
                    self.kept.add(event.step)
        if new:
            self.events.sort(key=lambda event: event.t)

    @property
    def start(self) -> Start:
        return next((event for event in self.events if isinstance(event, Start)), Start())

    @property
    def made(self) -> int:
        steps = [event.step for event in self.events] + [row.step for row in self.rows[-1:]]
        return max(steps, default=0)

    def open_now(self) -> list[Event]:
        return [e for row in self.rows if row.seconds == OPEN for e in self._typed(row, {})]

    def recent(self) -> list[Event]:
        """Return the finished operations of the last light steps, beginning with a whole step."""
        cut = self.rows[0].step if len(self.rows) == ROWS else -1
        made = self._collectives_made()
        events = [e for row in self.rows if row.seconds >= 0 for e in self._typed(row, made)]
        return [event for event in events if event.step > cut]

    def _collectives_made(self) -> dict[int, int]:
        """Map each row to the number of collectives it ran, which is the distance to the group's
        next row. If no row follows soon, assume as many as in a later row of the same call, or
        1."""
        made: dict[int, int] = {}
        usual: dict[int, int] = {}  # call -> number of collectives
        following: dict[str, Row] = {}  # group -> the next row with collectives in it
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
            return []  # the file is truncated
        seconds = row.seconds if row.seconds >= 0 else None
        raw = {**call, "event": call["of"], "t": row.t, "step": row.step, "seconds": seconds}
        if call["of"] == "batch":
            raw.update(batch=row.first, wait=row.seconds, seconds=None)
        elif row.first:
            count = made.get(row.number, call["of"] == "collective")
            raw["seq"] = [row.first, row.first - 1 + count]
        event = typed({**raw, **(more or {})}, self.sites)
        return [] if event is None else [event]


def _not_shared(files: Collection[_File]) -> set[int]:
    """Return the steps that one rank kept, and that another rank ran but did not keep."""
    kept = [file for file in files if file.kept]
    if not kept or all(file.kept == kept[0].kept for file in kept):
        return set()
    made = [(file.kept, file.made) for file in kept]
    steps = {step for file in kept for step in file.kept}
    return {s for s in steps if any(s not in own and s <= last for own, last in made)}


class Reader:
    """Reads a growing folder repeatedly, and only the new data each time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, _File] = {}

    def read(
        self, over: bool = True, stalled_seconds: float | None = None, **more: Any
    ) -> Observation:
        """Return what the ranks have written so far. `more` holds other fields of `Observation`."""
        for path in self.folder.glob("rank[0-9]*.jsonl"):
            self._files.setdefault(path, _File(path, Tail(path, parse_watched, mapped=True)))
        latest: dict[int, _File] = {}
        for path in sorted(self._files, key=_rank_and_attempt):
            self._files[path].grow()
            if self._files[path].events:
                latest[_rank_and_attempt(path)[0]] = self._files[path]
        settled, apart = over or stalled_seconds is not None, _not_shared(latest.values())
        ranks = [_watched_rank(n, file, settled, apart) for n, file in sorted(latest.items())]
        world = max([len(ranks), *(rank.start.world for rank in ranks)])
        notes = tuple(path.read_text().strip() for path in sorted(self.folder.glob("off-*.txt")))
        state = {"over": over, "stalled_seconds": stalled_seconds, "notes": notes, **more}
        return Observation(self.folder, ranks, world, **state)

    def ask(self, seconds: float = 1.0) -> None:
        """Ask every live rank where it is, and wait briefly for the answers."""
        asked = time.time()
        (self.folder / "ask").touch()
        os.utime(self.folder / "ask", (asked, asked))
        files = [file for file in self._files.values() if file.events]
        living = [file.path for file in files if _process_state(file.start)[0] is not False]
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(_answered(path, asked) for path in living):
            time.sleep(0.05)


def _answered(path: Path, asked: float) -> bool:
    answer = path.with_suffix(".json")
    return answer.exists() and answer.stat().st_mtime >= asked - 0.01


def _watched_rank(number: int, file: _File, settled: bool, apart: set[int]) -> WatchedRank:
    """Build one watched rank. `apart` holds the steps that another rank did not keep."""
    count, doing = read_open_operations(file.path.with_suffix(".now"))
    open_ = [event for raw in doing if (event := typed(raw, file.sites)) is not None]
    open_ += [event for event in file.open_now() if isinstance(event, WAITING)]
    events, others = file.events, []
    if apart:
        events = [event for event in file.events if not _is_of(event, apart)]
        others = [event for event in file.events if _is_of(event, apart)]
    has_answered = file.path.with_suffix(".json").exists()
    lives, state = _process_state(file.start)
    return WatchedRank(
        number,
        file.start,
        tuple(events),
        tuple(sorted(open_, key=lambda event: event.t)),
        lives,
        state,
        count + len(file.events) + sum(row.number for row in file.rows[-1:]),
        (*file.recent(), *file.failed, *others) if settled else (),
        settled,
        StackDump.read(file.path.parent, number) if has_answered else None,
    )


def _is_of(event: Event, steps: set[int]) -> bool:
    return isinstance(event, REPEATED) and event.step + (not isinstance(event, Step)) in steps


def _process_state(start: Start) -> tuple[bool | None, str | None]:
    """Return whether the process exists, and its state. Both are None on another machine."""
    if start.host != socket.gethostname():
        return None, None
    state = state_of(start.pid)
    return state not in (None, "Z", "X"), state


def _rank_and_attempt(path: Path) -> tuple[int, int]:
    """Parse a file name: rank0.jsonl is the first attempt of rank 0, rank0.2.jsonl the third."""
    rank, _, attempt = path.stem.removeprefix("rank").partition(".")
    return int(rank), int(attempt or 0)
