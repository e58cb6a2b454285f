"""The contents of one job's logs, sorted chronologically."""

from dataclasses import dataclass, field
from functools import cached_property

from paralab.analyse.collective_matching import CollectiveCall
from paralab.doctor.logs.exits import Exit, Exits, parse_spawn_report
from paralab.doctor.logs.line import Line
from paralab.doctor.logs.traceback import Traceback

HALF_A_YEAR = 183 * 86400


@dataclass(eq=False)
class Logs:
    sources: dict[str, int | None] = field(default_factory=dict)  # file -> the rank in its name
    lines: list[Line] = field(default_factory=list)  # the lines with a keyword
    tracebacks: list[Traceback] = field(default_factory=list)
    reports: list[Exits] = field(default_factory=list)
    last: dict[int, Line] = field(default_factory=dict)  # the last line of each rank
    lengths: dict[str, int] = field(default_factory=dict)  # number of lines in each file
    notes: list[str] = field(default_factory=list)
    worlds: set[int] = field(default_factory=set)  # world sizes that the job mentions
    dumps: dict[int, list[CollectiveCall]] = field(default_factory=dict)
    dump_names: dict[int, str] = field(default_factory=dict)

    def merge(self) -> None:
        """Sort by timestamp, or else in the order of the files. Launchers do not print the year, so
        sort January after December if a job runs past New Year."""
        kept = [*self.lines, *(trace.first for trace in self.tracebacks)]
        late = max((line.time for line in kept if line.time is not None), default=0.0)
        # Lines before a file's first timestamp are sorted just before it.
        starts: dict[str, float] = {}
        for line in kept:
            if line.time is not None:
                starts[line.source] = min(line.time, starts.get(line.source, line.time))
        order = {name: number for number, name in enumerate(self.sources)}

        def key(line: Line) -> tuple[float, int, int]:
            time = starts.get(line.source, late) if line.time is None else line.time
            time += 366 * 86400 if late - time > HALF_A_YEAR else 0
            return time, order.get(line.source, 0), line.number

        self.when = key
        self.lines.sort(key=key)
        self.tracebacks.sort(key=lambda trace: key(trace.first))
        ends = [parse_spawn_report(trace.errors[-1]) for trace in self.tracebacks if trace.errors]
        self.reports += [Exits([end]) for end in ends if end]
        self._assign_missing_ranks()

    @cached_property
    def exits(self) -> list[Exit]:
        """Return one exit per process. Prefer a report's entry, which has more information."""
        forced = {pid for report in self.reports for pid in report.forced}
        closed = {pid for report in self.reports for pid in report.closed}
        best: dict[object, Exit] = {}
        for exit_ in (exit_ for report in self.reports for exit_ in report.exits):
            signaled = exit_.pid in closed and exit_.code in (-15, -9, -2)
            exit_.asked = exit_.pid in forced or signaled
            name = ("process", exit_.pid) if exit_.pid is not None else ("rank", exit_.rank)
            known = best.get(name)
            if known is None or (known.rank is None and exit_.rank is not None) or exit_.first:
                best[name] = exit_
        return list(best.values())

    @cached_property
    def heard(self) -> set[int]:
        """Return the ranks in these logs. Only these can count as ranks without an error."""
        known = {*self.sources.values(), *self.last, *self.dumps}
        known |= {exit_.rank for exit_ in self.exits} | {line.rank for line in self.lines}
        known |= {trace.rank for trace in self.tracebacks}
        return {*(rank for rank in known if rank is not None), *range(max(self.worlds, default=0))}

    @cached_property
    def ranks(self) -> list[int]:
        """Return all ranks of the job, including every rank below the highest one mentioned."""
        return list(range(max(self.heard, default=-1) + 1))

    def _assign_missing_ranks(self) -> None:
        """Assign an error before init_process_group to the only rank that can have raised it."""
        named = {trace.rank for trace in self.tracebacks}
        unassigned = [t for t in self.tracebacks if t.rank is None and not t.of_launcher | t.logged]
        failed = [x for x in self.exits if not x.asked and x.rank not in {None, *named}]
        if len(unassigned) != 1 or len(failed) != 1:
            return
        if unassigned[0].is_fatal_signal == ((failed[0].code or 0) < 0):
            unassigned[0].rank = failed[0].rank
