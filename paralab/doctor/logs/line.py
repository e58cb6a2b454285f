"""One line of a log, freed of what launchers put before it: colours, progress bars, ranks, hosts
and stamps.

[default1]:[rank1]:[E1115 12:00:00.123456789 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught …
└ tee ────┘└ torch┘└ stamp ──────────────────────────────────────────┘└ text
3: W1115 12:00:00.123000 4711 torch/distributed/run.py:874] …        `srun -l`, then Python's stamp
gpu07:4711:4802 [1] NCCL WARN …                                     NCCL's own: host, process, thread, device
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
TEE = re.compile(r"\[([A-Za-z_]+)(\d+)\]: ?")
RANK = re.compile(r"\[rank ?(\d+)\]: ?")
NCCL_RANK = re.compile(r"\[Rank (\d+)\]|PG (?:ID|GUID) .{0,40}? Rank (\d+)\]")
LABEL = re.compile(r" *(\d+): ?")  # srun -l, mpirun -tag-output alike
GLOG = re.compile(r"([IWEFCV])(\d\d)(\d\d) (\d\d):(\d\d):(\d\d\.\d+) +\d+ (\S+:\d+)\] ?")
CPP = re.compile(r"\[([IWEF])(\d\d)(\d\d) (\d\d):(\d\d):(\d\d\.\d+) (\S+:\d+)\] ?")
ISO = re.compile(r"(?:\[?|.{0,24}? AT )\d{4}-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d(?:[.,]\d+)?)")
NCCL = re.compile(r"([\w.-]+):\d+:\d+ (?:\[\d+\] )?NCCL ")


@dataclass(frozen=True, slots=True)
class Line:
    """`time`: seconds since the start of an arbitrary year (launchers write no year); None where
    nothing in the file tells it. `stamped`: it began with a stamp of its own, which is how a logger
    writes and an interpreter that dies does not."""

    source: str
    number: int
    text: str
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    stamped: bool = False
    hooked: bool = False  # "[rank1]:", which torch's own hook for uncaught exceptions writes
    level: str | None = None
    compiled: bool = False  # torch's compiled code wrote it, often before an interpreter dies

    @property
    def place(self) -> str:
        return f"{self.source}:{self.number}"

    def __str__(self) -> str:
        text = self.text.strip()
        return f"{self.place}: {text if len(text) <= 400 else text[:400] + ' …'}"


def clean(raw: bytes) -> str:
    """Text of a line whatever its encoding, without colours; of a progress bar that was redrawn,
    the last picture."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or raw.count(0) * 3 > len(raw) > 0:
        raw = raw.replace(b"\0", b"").lstrip(b"\xff\xfe")  # UTF-16, as Windows shells redirect
    text = raw.decode("utf-8", errors="replace")
    if "\x1b" in text:
        text = ANSI.sub("", text)
    if "\r" in text:
        parts = [part for part in text.split("\r") if part.strip()]
        text = parts[-1] if parts else ""
    return text.rstrip()


def seconds(month: str, day: str, hour: str, minute: str, second: str) -> float | None:
    try:
        start = datetime(
            2000, int(month), int(day), int(hour), int(minute)
        )  # a leap year: the 29th of February exists
    except ValueError:
        return None
    return (start - datetime(2000, 1, 1)).total_seconds() + float(second.replace(",", "."))


def parse(
    source: str, number: int, text: str, rank: int | None, host: str | None, labelled: bool
) -> Line:
    """A clean line; `rank` and `host` are what its file's name says; `labelled`: this file has a
    rank before every line."""
    hooked = stamped = compiled = False
    time = level = None
    at = 0
    if labelled and (found := LABEL.match(text)):
        rank, at = int(found[1]), found.end()
    for _ in range(3):  # tee, torch's rank, a stamp: in whatever order
        if text.startswith("[", at):
            if found := RANK.match(text, at):
                rank, at, hooked = int(found[1]), found.end(), True
                continue
            if (found := TEE.match(text, at)) and found[1].lower() not in ("gpu", "stage", "layer"):
                rank, at = (rank if rank is not None else int(found[2])), found.end()
                continue
        if found := (GLOG.match(text, at) or CPP.match(text, at)):
            time, level, at, stamped = (
                seconds(*found.group(2, 3, 4, 5, 6)),
                found[1],
                found.end(),
                True,
            )
            compiled = found.re is CPP
        elif not stamped and (found := ISO.match(text, at)):
            time, stamped = seconds(*found.group(1, 2, 3, 4, 5)), True
        break
    if found := NCCL.match(text, at):
        host = found[1]
    if rank is None and (found := NCCL_RANK.search(text, at)):
        rank = int(found[1] or found[2])
    return Line(source, number, text[at:], rank, host, time, stamped, hooked, level, compiled)
