"""NCCL's watchdog, read: which collective timed out on which rank, and how far each rank had come.

[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, …,
         Timeout(ms)=600000) ran for 600020 milliseconds before timing out.
[Rank 1] …, last enqueued NCCL work: 811, last completed NCCL work: 807."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line
from paralab.units import size

TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?(?:, NumelOut=(\d+))?"
    r".*?Timeout\(ms\)=(\d+)\)(?: ran for (\d+) milliseconds)?"
)
PROGRESS = re.compile(
    r"[Ll]ast enqueued(?: NCCL)? work: (-?\d+), last completed(?: NCCL)? work: (-?\d+)"
)
GROUP = re.compile(r"PG (?:ID \d+ PG )?GUID (\w+)|PG ID (\d+)")


@dataclass
class Dog:
    """What the watchdog of one rank said about one group."""

    rank: int | None
    group: str
    number: int | None = None
    operation: str = "?"
    values: int | None = None
    timeout_ms: int = 0
    enqueued: int | None = None
    completed: int | None = None
    lines: list[Line] = field(default_factory=list)

    def __str__(self) -> str:
        size = f" of {sized(self.values)}" if self.values is not None else ""
        return f"collective {self.number}, {self.operation}{size}"


def sized(values: int) -> str:
    """ "9,801,523 elements (37.4 MiB in float32)"."""
    if values < 256:
        return f"{values} element{'s' if values != 1 else ''}"
    return f"{values:,} elements ({size(4 * values)} in float32)"


def dogs(logs: Logs) -> list[Dog]:
    """One per rank and group; the first timeout counts, later lines repeat it."""
    found: dict[tuple[int | None, str], Dog] = {}
    latest: Dog | None = None
    for line in logs.lines:
        group = GROUP.search(line.text)
        key = (line.rank, group[1] or group[2] if group else "0")
        if line.rank is None and latest is not None and latest.lines[0].source == line.source:
            key = (latest.rank, latest.group)  # it goes on about the line before
        if timeout := TIMEOUT.search(line.text):
            dog = found.setdefault(key, Dog(*key))
            if dog.number is None:
                dog.number, dog.operation = int(timeout[1]), timeout[2]
                dog.values = int(timeout[3]) if timeout[3] else None
                dog.timeout_ms = int(timeout[5])
                dog.lines.append(line)
            latest = dog
        if progress := PROGRESS.search(line.text):
            dog = found.setdefault(key, Dog(*key))
            if dog.enqueued is None:
                dog.enqueued, dog.completed = int(progress[1]), int(progress[2])
                if line not in dog.lines:
                    dog.lines.append(line)
    return [dog for dog in found.values() if dog.lines]
