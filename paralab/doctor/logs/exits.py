"""Read what torchrun, Slurm, and torch.multiprocessing report about process exits."""

import re
import signal as signals
from dataclasses import dataclass, field

from paralab.doctor.logs.line import Line, seconds

KEY = re.compile(r"\s+(time|rank|exitcode)\s*: ?(.*)$")
RANK = re.compile(r"(\d+) \(local_rank: (\d+)\)")
CODE = re.compile(r"(-?\d+) \(pid: (\d+)\)")
STAMP = re.compile(r"\d{4}-(\d\d)-(\d\d)_(\d\d):(\d\d):(\d\d)")
FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
CLOSING = re.compile(r"Sending process (\d+) closing signal (\w+)")
FORCED = re.compile(r"Unable to shutdown process (\d+) via")
TASKS = re.compile(r"srun: error: \S+: tasks? ([\d,\-]+): (.+)$")
SPAWNED = re.compile(
    r"ProcessExitedException: process (\d+) terminated with (?:signal (\w+)|exit code (\d+))"
)
EXITED = re.compile(r"Exited with exit code (\d+)")
SIGNAL_WORDS = {  # words that Slurm and Python's fault handler print
    **{"Killed": 9, "Out Of Memory": 9, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7},
    **{"Illegal instruction": 4, "Terminated": 15, "Floating point exception": 8},
}


def signal_in(text: str) -> int | None:
    return next((number for word, number in SIGNAL_WORDS.items() if word in text), None)


@dataclass
class Exit:
    """The exit of one process. `code` is negative for a signal, as torchrun prints it. `asked` is
    True if the launcher stopped the process."""

    line: Line
    code: int | None = None
    rank: int | None = None
    pid: int | None = None
    local_rank: int | None = None  # the rank on its node; a truncated report may have only this
    time: float | None = None
    first: bool = False  # torchrun's "Root Cause (first observed failure)"
    asked: bool = False

    @property
    def signal(self) -> str | None:
        if self.code is None or self.code >= 0:
            return None
        try:
            return signals.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


@dataclass
class Exits:
    """The exits that a launcher reports in one stream, collected line by line."""

    exits: list[Exit] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)  # processes that the launcher signaled
    forced: set[int] = field(default_factory=set)  # processes that the launcher killed
    _root: bool = False
    _entry: Exit | None = None

    @property
    def entry_rank(self) -> int | None:
        return self._entry.rank if self._entry else None

    def feed(self, line: Line) -> None:
        text = line.text
        if "Root Cause (first observed" in text:
            self._root = True
        elif text.startswith("Failures:"):
            self._root, self._entry = False, None
        elif found := KEY.match(text):
            self._take(line, found[1], found[2])
        elif found := FAILED.search(text):
            self.exits.append(
                Exit(line, int(found[1]), None, int(found[3]), int(found[2]), line.time)
            )
        elif found := CLOSING.search(text):
            self.closed.add(int(found[1]))
        elif found := FORCED.search(text):
            self.forced.add(int(found[1]))
        elif found := TASKS.search(text):
            tasks, words = found.groups()
            exited, number = EXITED.search(words), signal_in(words)
            if number or exited:
                code = -number if number else int(exited[1]) if exited else 0
                self.exits += [Exit(line, code, r, time=line.time) for r in tasks_of(tasks)]

    def _take(self, line: Line, key: str, value: str) -> None:
        if key == "time":  # the first line of each entry in a report
            stamp = STAMP.match(value)
            time = seconds(*stamp.groups()) if stamp else None
            self._entry = Exit(line, time=time, first=self._root)
        entry = self._entry
        if entry is None:
            return
        if key == "rank" and (found := RANK.match(value)):
            entry.rank, entry.line = int(found[1]), line
        elif key == "exitcode" and (found := CODE.match(value)) and entry.rank is not None:
            entry.code, entry.pid, entry.line = int(found[1]), int(found[2]), line
            self.exits.append(entry)


def parse_spawn_report(line: Line) -> Exit | None:
    """Parse torch.multiprocessing.spawn's report of a process that exited without an exception."""
    found = SPAWNED.search(line.text)
    if found is None or (found[2] and found[2] not in signals.Signals.__members__):
        return None
    code = int(found[3]) if found[3] else -signals.Signals[found[2]]
    return Exit(line, code, int(found[1]), time=line.time, first=True)


def tasks_of(text: str) -> list[int]:
    """Parse a list of tasks: "0-2,5" means 0, 1, 2, and 5."""
    tasks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            stop = min(int(last), int(first) + 65536) if last.isdigit() else int(first)
            tasks += range(int(first), stop + 1)
    return tasks
