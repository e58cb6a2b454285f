"""What torchrun and Slurm say about the end of processes: reports, exit codes, signals."""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass, field

from paralab.doctor.logs.line import Line, seconds

KEY = re.compile(r"\s+(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)$")
RANK = re.compile(r"(\d+) \(local_rank: (\d+)\)")
CODE = re.compile(r"(-?\d+) \(pid: (\d+)\)")
STAMP = re.compile(r"\d{4}-(\d\d)-(\d\d)_(\d\d):(\d\d):(\d\d)")
FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
CLOSING = re.compile(r"Sending process (\d+) closing signal (\w+)")
FORCED = re.compile(r"Unable to shutdown process (\d+) via")
TASKS = re.compile(r"srun: error: (\S+): tasks? ([\d,\-]+): (.+)$")
SPAWNED = re.compile(
    r"ProcessExitedException: process (\d+) terminated with (?:signal (\w+)|exit code (\d+))"
)
EXITED = re.compile(r"Exited with exit code (\d+)")
WORDS = {
    "Killed": 9,
    "Out Of Memory": 9,
    "Segmentation fault": 11,
    "Aborted": 6,
    "Bus error": 7,
    "Illegal instruction": 4,
    "Terminated": 15,
    "Floating point exception": 8,
}


@dataclass
class Exit:
    """The end of one process. `code` is negative for a signal, as torchrun writes it. `asked`: the
    launcher ended it itself."""

    line: Line
    code: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    time: float | None = None
    host: str | None = None
    first: bool = False  # torchrun's "Root Cause (first observed failure)"
    asked: bool = False
    words: str = ""  # Slurm's

    @property
    def signal(self) -> str | None:
        try:
            return (
                signals.Signals(-self.code).name
                if self.code is not None and self.code < 0
                else None
            )
        except ValueError:
            return f"signal {-self.code}" if self.code else None


@dataclass
class Ends:
    """The exits of a job, gathered line by line from one stream of its launcher."""

    exits: list[Exit] = field(default_factory=list)
    closed: dict[int, str] = field(default_factory=dict)  # process -> signal that the launcher sent
    forced: set[int] = field(default_factory=set)
    lines: list[Line] = field(default_factory=list)
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
            self._keyed(line, found[1], found[2])
        elif found := FAILED.search(text):
            self.exits.append(
                Exit(
                    line, int(found[1]), local_rank=int(found[2]), pid=int(found[3]), time=line.time
                )
            )
        elif found := CLOSING.search(text):
            self.closed[int(found[1])] = found[2]
            self.lines.append(line)
        elif found := FORCED.search(text):
            self.forced.add(int(found[1]))
        elif found := TASKS.search(text):
            self._tasks(line, found[1], found[2], found[3])

    def _keyed(self, line: Line, key: str, value: str) -> None:
        if key == "time":  # every entry of a report begins with it
            stamp = STAMP.match(value)
            self._entry = Exit(
                line, time=seconds(*stamp.groups()) if stamp else None, first=self._root
            )
        if self._entry is None:
            return
        if key == "host":
            self._entry.host = value.strip()
        elif key == "rank" and (found := RANK.match(value)):
            self._entry.rank, self._entry.local_rank, self._entry.line = (
                int(found[1]),
                int(found[2]),
                line,
            )
        elif key == "exitcode" and (found := CODE.match(value)) and self._entry.rank is not None:
            self._entry.code, self._entry.pid, self._entry.line = int(found[1]), int(found[2]), line
            self.exits.append(self._entry)

    def _tasks(self, line: Line, host: str, tasks: str, words: str) -> None:
        code = next((-number for word, number in WORDS.items() if word in words), None)
        if code is None and (found := EXITED.search(words)):
            code = int(found[1])
        if code is not None:
            self.exits += [
                Exit(line, code, task, None, None, line.time, host, words=words)
                for task in numbers(tasks)
            ]


def spawned(line: Line) -> Exit | None:
    """What torch.multiprocessing.spawn says of a process that ended without an exception."""
    found = SPAWNED.search(line.text)
    if found is None:
        return None
    try:
        code = int(found[3]) if found[3] else -signals.Signals[found[2]]
    except KeyError:
        return None
    return Exit(line, code, int(found[1]), time=line.time, first=True)


def numbers(text: str) -> list[int]:
    """ "0-2,5" are 0, 1, 2 and 5."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += (
                range(int(first), min(int(last), int(first) + 65536) + 1)
                if last.isdigit()
                else [int(first)]
            )
    return found
