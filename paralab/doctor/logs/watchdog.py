"""NCCL's watchdog: which collective timed out on which rank, and how far each rank got.

[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, …,
         Timeout(ms)=600000) ran for 600020 milliseconds before timing out.
[PG ID 0 PG GUID 0(default_pg) Rank 1] …, last enqueued NCCL work: 811, last completed NCCL work: 807.

Each group has its own numbers: number 5 in one group has nothing to do with number 5 in another."""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from paralab.analyse.collective_matching import DEFAULT_GROUP, CollectiveCall, kind_of
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line

TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
    r"(?:, NumelIn=(\d+))?.*?Timeout\(ms\)=(\d+)\)"
)
PROGRESS = re.compile(
    r"(?:at (?:NCCL )?work(?: sequence id)?: (\d+).*?)?"
    r"ast enqueued(?: NCCL)? work: (-?\d+), last completed(?: NCCL)? work: (-?\d+)"
)
GROUP = re.compile(r"PG (?:ID \d+ PG )?GUID (\w+)|PG (?:ID )?(\d+) ")
UNKNOWN_SIZE = 1 << 63  # NCCL prints -1 as a large number for coalesced operations


@dataclass
class Waiting:
    """The watchdog's report for one rank and group. `call` is the collective that timed out."""

    rank: int | None
    group: str
    call: CollectiveCall | None = None
    timeout_seconds: float = 0.0
    enqueued: int | None = None
    completed: int | None = None
    lines: list[Line] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Return the number of the collective that timed out, or -1 if none did."""
        return -1 if self.call is None or self.call.number is None else self.call.number

    @property
    def values(self) -> int:
        return (self.call.values if self.call else None) or 0

    def __str__(self) -> str:
        return f"collective {self.number}, {self.call}"


def _group_in(text: str) -> str | None:
    found = GROUP.search(text)
    return found[1] or found[2] if found else None


def waiting_ranks(logs: Logs) -> list[Waiting]:
    """Return one report per rank and group. Use the first timeout; later lines repeat it. A timeout
    does not name its group, but the rank's next lines about the same number do. If there are none,
    use other ranks' lines."""
    by_rank: dict[tuple[int | None, str], Waiting] = {}
    groups: dict[tuple[int | None, int], str] = {}  # rank, number -> group
    others: dict[int, set[str]] = defaultdict(set)  # number -> the groups of all ranks
    for line in logs.lines:
        progress, group = PROGRESS.search(line.text), _group_in(line.text)
        if progress and group and progress[1]:
            groups[line.rank, int(progress[1])] = group
            others[int(progress[1])].add(group)
    rank = None
    for line in logs.lines:
        timeout, progress = TIMEOUT.search(line.text), PROGRESS.search(line.text)
        if not timeout and not progress:
            continue
        rank = line.rank if line.rank is not None else rank  # this line continues the previous one
        name = _group_in(line.text)
        if timeout:
            number = int(timeout[1])
            shared = next(iter(others[number])) if len(others[number]) == 1 else None
            name = groups.get((rank, number), name or shared)
        name = name or DEFAULT_GROUP
        item = by_rank.setdefault((rank, name), Waiting(rank, name))
        if timeout and item.call is None:
            values = int(timeout[3]) if timeout[3] else UNKNOWN_SIZE
            shapes = ((values,),) if values < UNKNOWN_SIZE else None
            kind = kind_of(timeout[2]) or timeout[2].lower()
            item.call = CollectiveCall(kind, name, number, shapes, is_open=True)
            item.timeout_seconds = int(timeout[4]) / 1000
            item.lines.append(line)
        if progress and item.enqueued is None:
            item.enqueued, item.completed = int(progress[2]), int(progress[3])
            item.lines += [line] if line not in item.lines else []
    return list(by_rank.values())
