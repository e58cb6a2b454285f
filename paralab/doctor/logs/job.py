"""Everything that the logs of one job say, on one clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from paralab.analyse.collective_matching import CollectiveCall
from paralab.doctor.logs.line import Line
from paralab.doctor.logs.report import Ends, Exit, spawned
from paralab.doctor.logs.traceback import Traceback

HALF_A_YEAR = 183 * 86400


@dataclass(eq=False)
class Logs:
    """`lines` are those with a word that some rule knows; `last` the last thing each rank said."""

    sources: dict[str, int | None] = field(
        default_factory=dict
    )  # file -> the rank that its name tells
    lines: list[Line] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    ends: list[Ends] = field(default_factory=list)
    last: dict[int, Line] = field(default_factory=dict)
    worlds: set[int] = field(default_factory=set)  # numbers of ranks that the job has mentioned
    dumps: dict[int, list[CollectiveCall]] = field(default_factory=dict)
    dump_names: dict[int, str] = field(default_factory=dict)

    def add_source(self, name: str, rank: int | None) -> None:
        self.sources[name] = rank

    def merge(self) -> None:
        """Put all on one clock: by stamp, else in the order of the files. Launchers write no year:
        a job that ran over New Year has its January after its December."""
        kept = [*self.lines, *(trace.first for trace in self.tracebacks)]
        late = max((line.time for line in kept if line.time is not None), default=0.0)
        starts: dict[
            str, float
        ] = {}  # what a file says before its first stamp lies just before that
        for line in kept:
            if line.time is not None:
                starts[line.source] = min(line.time, starts.get(line.source, line.time))
        order = {name: number for number, name in enumerate(self.sources)}

        def key(line: Line) -> tuple[float, int, int]:
            time = starts.get(line.source, late) if line.time is None else line.time
            return (
                time + (366 * 86400 if late - time > HALF_A_YEAR else 0),
                order.get(line.source, 0),
                line.number,
            )

        self._key = key
        self.lines.sort(key=key)
        told = [
            exit_
            for trace in self.tracebacks
            if trace.errors and (exit_ := spawned(trace.errors[-1]))
        ]
        self.ends += [Ends([exit_]) for exit_ in told]
        self.tracebacks.sort(key=lambda trace: key(trace.first))
        self._settle_ranks()

    def when(self, line: Line) -> tuple[float, int, int]:
        return self._key(line)

    @cached_property
    def exits(self) -> list[Exit]:
        """One per process: a report's entry tells more than the line that announced it."""
        forced = {pid for ends in self.ends for pid in ends.forced}
        closed = {pid: sig for ends in self.ends for pid, sig in ends.closed.items()}
        best: dict[object, Exit] = {}
        for ends in self.ends:
            for exit_ in ends.exits:
                exit_.asked = exit_.pid in forced or (
                    exit_.pid in closed and exit_.code in (-15, -9, -2)
                )
                name = exit_.pid if exit_.pid is not None else (exit_.rank, exit_.host)
                if (
                    name not in best
                    or (best[name].rank is None and exit_.rank is not None)
                    or exit_.first
                ):
                    best[name] = exit_
        return list(best.values())

    @cached_property
    def accused(self) -> Exit | None:
        """torchrun's own "Root Cause (first observed failure)"."""
        return next((exit_ for exit_ in self.exits if exit_.first), None)

    @cached_property
    def heard(self) -> set[int]:
        """The ranks that these logs speak of: only of them can be said that they left no error."""
        known = (
            {rank for rank in self.sources.values() if rank is not None}
            | set(self.last)
            | set(self.dumps)
        )
        known |= {exit_.rank for exit_ in self.exits if exit_.rank is not None}
        known |= {line.rank for line in self.lines if line.rank is not None}
        known |= {trace.rank for trace in self.tracebacks if trace.rank is not None}
        return known | set(range(max(self.worlds, default=0)))

    @cached_property
    def ranks(self) -> list[int]:
        """All ranks of the job that are known of; those below one that was heard exist too."""
        return list(range(max(self.heard, default=-1) + 1))

    def _settle_ranks(self) -> None:
        """An error before init_process_group bears no rank. If the launcher's report leaves one
        rank that can have raised it, it is that rank's."""
        if not self.exits:
            return
        nameless = [
            trace
            for trace in self.tracebacks
            if trace.rank is None and not trace.of_launcher and not trace.logged
        ]
        named = {trace.rank for trace in self.tracebacks if trace.rank is not None}
        failed = [
            exit_
            for exit_ in self.exits
            if exit_.rank is not None and not exit_.asked and exit_.rank not in named
        ]
        if len(nameless) == 1 and len(failed) == 1:
            by_signal = nameless[0].error.startswith("Fatal Python error")
            if by_signal == ((failed[0].code or 0) < 0):
                nameless[0].rank = failed[0].rank
