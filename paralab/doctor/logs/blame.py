"""Who began it, and who only noticed: every error of a job is a root (a rank's own), a victim's
(another one is gone), or unknown.

    12:00:07  rank 1  ValueError: image 13 has 0 bytes             root: nobody else has to do with it
    12:00:07  rank 0  Connection closed by peer [127.0.0.1]        victim: it waited for rank 1
    12:00:08  rank 0  ended by SIGTERM                             victim: torchrun tidied up

The first root wins. Without one, the culprit is among those that said nothing at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from paralab.analyse.failure import BETWEEN_RANKS, GONE, WAITED
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line
from paralab.doctor.logs.report import Exit
from paralab.doctor.logs.source import called_alone
from paralab.doctor.logs.traceback import Traceback

Role = Literal["root", "victim", "unknown"]
MISMATCH = re.compile(r"collective mismatch in your code|mismatch between collectives")
INTERRUPTED = ("KeyboardInterrupt", "SystemExit", "SignalException")


@dataclass(frozen=True)
class Event:
    """`waited`: this victim waited until its patience was over; else somebody was gone at once."""

    role: Role
    rank: int | None
    line: Line
    trace: Traceback | None = None
    exit: Exit | None = None
    waited: bool = False

    @property
    def where(self) -> str:
        at = self.trace.where if self.trace else None
        return f"{at.file}:{at.line}" if at else ""

    @property
    def in_backward(self) -> bool:
        """It waited for gradients: in those all ranks have the same part, so whoever does not come
        is to blame."""
        frames = self.trace.frames if self.trace else []
        return any(
            "torch/autograd" in frame.file or frame.function == "backward" for frame in frames
        )

    @property
    def in_buffers(self) -> bool:
        frames = self.trace.frames if self.trace else []
        return any(frame.function in ("_sync_buffers", "_sync_module_buffers") for frame in frames)

    @property
    def alone(self) -> bool | None:
        """It called a collective under a rank condition, and is the culprit itself. None: nobody
        can tell."""
        if self.trace is None:
            return None
        return False if self.in_backward else called_alone(self.trace)

    def evidence(self) -> tuple[str, ...]:
        return self.trace.evidence() if self.trace else (str(self.line),)


@dataclass(frozen=True)
class Blame:
    """All events on one clock. `silent`: ranks that left no error and were not ended by the
    launcher; `ended`: ranks that said nothing and were still there when the launcher ended them."""

    roots: tuple[Event, ...]
    victims: tuple[Event, ...]
    unknown: tuple[Event, ...]
    silent: tuple[int, ...]
    ended: tuple[int, ...]

    @property
    def absent(self) -> tuple[int, ...]:
        return tuple(sorted({*self.silent, *self.ended}))


def blame(logs: Logs) -> Blame:
    traces = [_of_trace(trace) for trace in fatal(logs)]
    exits = [event for exit_ in logs.exits if (event := _of_exit(exit_, logs, traces))]
    dogs = [
        Event("victim", line.rank, line, waited=True)
        for line in logs.lines
        if "Watchdog caught collective" in line.text
    ]
    spoken = {event.rank for event in traces if event.role == "victim"}
    dogs = [event for event in _first_of_each_rank(dogs) if event.rank not in spoken]
    events = sorted([*traces, *exits, *dogs], key=lambda event: _when(event, logs))
    failed = {event.rank for event in events if event.role != "unknown"}
    ended = {
        exit_.rank
        for exit_ in logs.exits
        if exit_.rank is not None and (exit_.asked or exit_.code == -15)
    } - failed
    exited = {exit_.rank for exit_ in logs.exits if exit_.rank is not None}
    silent = logs.heard - failed - ended - exited

    def of(role: Role) -> tuple[Event, ...]:
        return tuple(event for event in events if event.role == role)

    return Blame(
        of("root"),
        of("victim"),
        of("unknown"),
        tuple(sorted(silent)),
        tuple(sorted(rank for rank in ended if rank is not None)),
    )


def fatal(logs: Logs) -> list[Traceback]:
    """Tracebacks that ended a process: torch's hook wrote them, or nothing came after them. One
    that a logger wrote, or after which its file goes on, was caught. A process that dies says the
    same twice at most: once itself, once in the launcher's report."""
    traces = [trace for trace in logs.tracebacks if not trace.of_launcher and trace.errors]
    sure = [
        trace
        for trace in traces
        if not trace.logged and (trace.hooked or trace.reported or trace.followed <= 3)
    ]
    failed = any(exit_.code and not exit_.asked for exit_ in logs.exits)
    if failed and not any(_of_trace(trace).role == "root" for trace in sure):
        sure += [trace for trace in traces if not trace.logged and trace not in sure]
        last = {
            trace.rank: trace for trace in traces if trace.logged
        }  # caught, written down, and then given up
        sure += [
            trace
            for trace in last.values()
            if trace.rank in {e.rank for e in logs.exits if e.code and e.code > 0}
        ]
    seen: dict[object, Traceback] = {}
    for trace in sorted(sure, key=lambda trace: trace.reported):
        seen.setdefault((trace.rank, trace.error) if trace.rank is not None else id(trace), trace)
    return sorted(seen.values(), key=lambda trace: logs.when(trace.first))


def is_victim(trace: Traceback) -> bool:
    text = "\n".join(line.text for line in trace.errors)
    frames = "\n".join(frame.file for frame in trace.frames)
    broken = GONE.search(text) or WAITED.search(text)
    return bool(
        broken
        and (BETWEEN_RANKS.search(text) or BETWEEN_RANKS.search(frames))
        and not MISMATCH.search(text)
    )


def _of_trace(trace: Traceback) -> Event:
    role: Role = (
        "victim" if is_victim(trace) else "unknown" if trace.kind in INTERRUPTED else "root"
    )
    waited = role == "victim" and any(WAITED.search(line.text) for line in trace.errors)
    return Event(role, trace.rank, trace.first, trace, waited=waited)


def _of_exit(exit_: Exit, logs: Logs, traces: list[Event]) -> Event | None:
    """A signal is a cause of its own, unless the launcher sent it or the rank had already told of
    another's end."""
    told = {event.rank for event in traces}
    if exit_.asked or not exit_.code or exit_.rank in told or exit_.code == -15:
        return None
    if exit_.code > 0:
        nameless = any(event.rank is None for event in traces)
        return None if nameless else Event("unknown", exit_.rank, exit_.line, exit=exit_)
    if exit_.code == -6:
        return Event(_aborted(logs), exit_.rank, exit_.line, exit=exit_)
    if exit_.code == -2:
        return Event("unknown", exit_.rank, exit_.line, exit=exit_)
    return Event("root", exit_.rank, exit_.line, exit=exit_)


def _aborted(logs: Logs) -> Role:
    """Compiled code that gives up says why. Between ranks it is a victim as a rule, and without
    words nobody can tell."""
    words = [
        line.text
        for line in logs.lines
        if "what():" in line.text or "Watchdog caught" in line.text or MISMATCH.search(line.text)
    ]
    if not words:
        return "unknown"
    return (
        "victim"
        if any(BETWEEN_RANKS.search(text) or MISMATCH.search(text) for text in words)
        else "root"
    )


def _when(event: Event, logs: Logs) -> tuple[float, int, int]:
    """A traceback bears no stamp. Within one file the order of lines counts; between files, when
    the launcher saw the rank end."""
    time, file, number = logs.when(event.line)
    if event.trace is not None and len(logs.sources) > 1:
        time = next(
            (
                exit_.time
                for exit_ in logs.exits
                if exit_.rank == event.rank and exit_.time is not None
            ),
            time,
        )
    return time, file, number


def _first_of_each_rank(events: list[Event]) -> list[Event]:
    first: dict[int | None, Event] = {}
    for event in events:
        first.setdefault(event.rank, event)
    return list(first.values())
