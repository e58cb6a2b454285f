"""Find which rank failed first, and which ranks failed as a consequence. Every error in a job is a
root (the rank's own), a victim (another rank caused it), or unknown.

    12:00:07  rank 1  ValueError: image 13 has 0 bytes      root: nothing to do with other ranks
    12:00:07  rank 0  Connection closed by peer             victim: it waited for rank 1
    12:00:08  rank 0  killed by SIGTERM                     victim: torchrun cleaned up

The first root is the cause. Without a root, the culprit is among the ranks without an error."""

import re
import signal as signals
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from paralab.doctor.logs.exits import Exit, signal_in
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line
from paralab.doctor.logs.traceback import Frame, Traceback
from paralab.doctor.place import Place
from paralab.doctor.registry import Finding, Severity
from paralab.doctor.source_context import conditions
from paralab.record.victims import MISMATCH, WAITED

Role = Literal["root", "victim", "unknown"]
INTERRUPTED = ("KeyboardInterrupt", "SystemExit", "SignalException")


@dataclass(frozen=True)
class Event:
    """A failure. `waited` is True if a victim waited until its timeout, not if it lost a
    connection."""

    role: Role
    rank: int | None
    line: Line
    trace: Traceback | None = None
    exit: Exit | None = None
    waited: bool = False

    @property
    def at(self) -> Frame | None:
        return self.trace.where if self.trace else None

    @property
    def who(self) -> str:
        if self.rank is not None:
            return f"Rank {self.rank}"
        local = self.exit.local_rank if self.exit else None
        return "A process" if local is None else f"The process with local rank {local}"

    @property
    def where(self) -> str:
        return f" at {self.at}" if self.at else ""

    @property
    def frames(self) -> list[Frame]:
        return self.trace.frames if self.trace else []

    @property
    def in_backward(self) -> bool:
        """Return whether this rank waited for gradients, so that the missing rank is at fault."""
        return any("torch/autograd" in f.file or f.function == "backward" for f in self.frames)

    @property
    def in_buffers(self) -> bool:
        return any(f.function in ("_sync_buffers", "_sync_module_buffers") for f in self.frames)

    @property
    def alone(self) -> bool | None:
        """Return whether this rank called the collective under a rank condition, which makes it
        the culprit. Return None if the file is missing or has changed."""
        own = [frame for frame in self.frames if frame.own]
        if self.in_backward or not own:
            return False if self.in_backward else None
        known = [_is_under_rank_condition(frame) for frame in own]
        return True if any(known) else None if None in known else False

    @property
    def signal(self) -> str | None:
        """Return the signal that killed the process, from its exit code or the fault handler."""
        if self.exit:
            return self.exit.signal
        if not (self.trace and self.trace.is_fatal_signal):
            return None
        number = signal_in(self.trace.error)
        return signals.Signals(number).name if number else "a fatal error"

    def evidence(self) -> tuple[str, ...]:
        return self.trace.evidence() if self.trace else (str(self.line),)

    def finding(
        self,
        id: str,
        severity: Severity,
        why: str,
        fix: str = "",
        rank: int | None = None,
        evidence: Iterable[str] | None = None,
    ) -> Finding:
        """Create a finding at this event's line. `fix` defaults to the entry's fix, and `evidence`
        to the event's."""
        file, line = (self.at.file, self.at.line) if self.at else (None, None)
        seen = self.evidence() if evidence is None else tuple(evidence)
        return Finding(id, severity, why, fix, file, line, rank, seen)


def _is_under_rank_condition(frame: Frame) -> bool | None:
    place = Place(frame.file, frame.line, frame.function)
    is_here = Path(frame.file).is_absolute() and bool(place.code)
    if not is_here or frame.code not in ("", place.code):
        return None
    return any(condition.is_about_the_rank for condition in conditions(place))


@dataclass(frozen=True)
class Blame:
    """All failures, chronologically. `absent` lists the ranks without an error. `silent` lists
    those that the launcher did not stop."""

    roots: tuple[Event, ...]
    victims: tuple[Event, ...]
    unknown: tuple[Event, ...]
    silent: tuple[int, ...]
    absent: tuple[int, ...]

    @property
    def crash(self) -> Event | None:
        return self.roots[0] if self.roots and self.roots[0].signal else None


@lru_cache(maxsize=4)
def blame(logs: Logs) -> Blame:
    traces = [_of_trace(trace) for trace in fatal(logs)]
    exits = [event for exit_ in logs.exits if (event := _of_exit(exit_, logs, traces))]
    victims = {event.rank for event in traces if event.role == "victim"}
    dogs: dict[int | None, Event] = {}
    for line in logs.lines:
        if "Watchdog caught collective" in line.text and line.rank not in victims:
            dogs.setdefault(line.rank, Event("victim", line.rank, line, waited=True))
    events = [*traces, *exits, *dogs.values()]
    events.sort(key=lambda event: _when(event, logs))

    failed = {event.rank for event in events if event.role != "unknown"}
    failed |= {trace.rank for trace in logs.tracebacks if not trace.errors}  # the log is truncated
    ended = {x.rank for x in logs.exits if x.rank is not None and (x.asked or x.code == -15)}
    silent = logs.heard - failed - {exit_.rank for exit_ in logs.exits}
    absent = tuple(sorted(silent | (ended - failed)))

    def of(role: Role) -> tuple[Event, ...]:
        return tuple(event for event in events if event.role == role)

    return Blame(of("root"), of("victim"), of("unknown"), tuple(sorted(silent)), absent)


def fatal(logs: Logs) -> list[Traceback]:
    """Return the tracebacks of exceptions that ended a process: those that torch's hook printed,
    and those that no output follows. If a logger printed the traceback, or output continues after it, the exception was caught."""
    traces = [trace for trace in logs.tracebacks if trace.errors and not trace.of_launcher]
    plain = [trace for trace in traces if not trace.logged]
    sure = [t for t in plain if t.first.hooked or t.reported or t.followed <= 3]
    failed = any(exit_.code and not exit_.asked for exit_ in logs.exits)
    if failed and not any(_of_trace(trace).role == "root" for trace in sure):
        sure += [trace for trace in plain if trace not in sure]
        # The program logged the exception, and then exited.
        last = {trace.rank: trace for trace in traces if trace.logged}
        ended = {exit_.rank for exit_ in logs.exits if (exit_.code or 0) > 0}
        sure += [trace for rank, trace in last.items() if rank in ended]
    once: dict[object, Traceback] = {}  # the launcher repeats what a process printed
    for trace in sorted(sure, key=lambda trace: trace.reported):
        once.setdefault((trace.rank, trace.error) if trace.rank is not None else id(trace), trace)
    return sorted(once.values(), key=lambda trace: logs.when(trace.first))


def _of_trace(trace: Traceback) -> Event:
    victim = trace.of_victim
    role: Role = "victim" if victim else "unknown" if trace.kind in INTERRUPTED else "root"
    waited = victim and any(WAITED.search(line.text) for line in trace.errors)
    return Event(role, trace.rank, trace.first, trace, waited=waited)


def _of_exit(exit_: Exit, logs: Logs, traces: list[Event]) -> Event | None:
    """Classify an exit. A signal is a root cause, unless the launcher or Ctrl-C sent it or the rank
    aborted because of another rank."""
    traced_ranks = {event.rank for event in traces}
    if exit_.asked or not exit_.code or exit_.rank in traced_ranks or exit_.code == -15:
        return None
    if exit_.code > 0 and None in traced_ranks:
        return None
    role: Role = "unknown" if exit_.code > 0 or exit_.code == -2 else "root"
    if exit_.code == -6:
        role = _role_of_abort(logs)
    return Event(role, exit_.rank, exit_.line, exit=exit_)


def _role_of_abort(logs: Logs) -> Role:
    """Classify an abort. C++ code prints a reason before it aborts. Without a reason, the role is
    unknown."""
    reasons = [x.text for x in logs.lines if "what():" in x.text or "Watchdog" in x.text]
    if any(MISMATCH.search(line.text) for line in logs.lines):
        return "victim"
    if not reasons:
        return "unknown"
    return "victim" if re.search("NCCL|gloo|c10d|Dist", " ".join(reasons)) else "root"


def _when(event: Event, logs: Logs) -> tuple[float, int, int]:
    """Return a sort key. Tracebacks have no timestamp, so sort them by line number within a file.
    Across files, sort them by the time at which the launcher saw the rank exit."""
    time, file, number = logs.when(event.line)
    if event.trace is not None and len(logs.sources) > 1:
        exits = (x.time for x in logs.exits if x.rank == event.rank and x.time is not None)
        time = next(exits, time)
    return time, file, number
