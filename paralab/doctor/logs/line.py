"""One line of a log, without colors, progress bars, and launchers' prefixes (ranks, timestamps).

[default1]:[rank1]:[E1115 12:00:00.123456789 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught …
└ tee ────┘└ torch┘└ stamp ──────────────────────────────────────────┘└ text
3: W1115 12:00:00.123000 4711 torch/distributed/run.py:874] …        `srun -l`, then Python's stamp
"""

import re
from dataclasses import dataclass
from datetime import datetime

ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# The prefix of torchrun --tee, or mpirun's `[1,3]<stderr>:`
TEE = re.compile(r"\[([A-Za-z_]+|\d+,)(\d+)(?:\|\d+)?\](?:<std\w+>)?: ?")
RANK = re.compile(r"\[rank ?(\d+)\]: ?")
NCCL_RANK = re.compile(r"\[Rank (\d+)\]|\[PG .{0,60}? Rank (\d+)\]")
LABEL = re.compile(r" *(\d+): ?")  # the prefix of srun -l
GLOG = re.compile(r"([IWEFCV])(\d\d)(\d\d) (\d\d):(\d\d):(\d\d\.\d+) +\d+ (\S+:\d+)\] ?")
CPP = re.compile(r"\[([IWEF])(?:(\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d\.\d+))? (\S+:\d+)\] ?")
ISO = re.compile(r"(?:\[?|.{0,24}? AT )\d{4}-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d(?:[.,]\d+)?)")
# A log collector's timestamp, or a progress bar
BEFORE_RANK = re.compile(r"[\d\s:.,TZ\[\]/-]*$|.*\d%\|")


@dataclass(frozen=True, slots=True)
class Line:
    """`time` is in seconds since the start of an arbitrary year (launchers do not print the year),
    or None. A `stamped` line begins with a timestamp, so a logger wrote it, not a crashing
    interpreter."""

    source: str
    number: int
    text: str
    rank: int | None = None
    time: float | None = None
    stamped: bool = False
    hooked: bool = False  # "[rank1]:", from torch's hook for uncaught exceptions
    compiled: bool = False  # from torch's C++ code or launcher, not a logger

    def __str__(self) -> str:
        text = self.text.strip()
        return f"{self.source}:{self.number}: {text if len(text) <= 400 else text[:400] + ' …'}"


def clean(raw: bytes) -> str:
    """Decode a line in any encoding. Remove colors and all but a progress bar's last state."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or raw.count(0) * 3 > len(raw) > 0:
        # UTF-16, which Windows shells write when they redirect output
        raw = raw.replace(b"\0", b"").lstrip(b"\xff\xfe")
    text = raw.decode("utf-8", errors="replace")
    if "\x1b" in text:
        text = ANSI.sub("", text)
    if "\r" in text:
        text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    return text.rstrip()


def seconds(month: str, day: str, hour: str, minute: str, second: str) -> float | None:
    try:  # use a leap year, which has a February 29
        start = datetime(2000, int(month), int(day), int(hour), int(minute))
    except ValueError:
        return None
    return (start - datetime(2000, 1, 1)).total_seconds() + float(second.replace(",", "."))


def parse(source: str, number: int, text: str, rank: int | None, labeled: bool) -> Line:
    """Parse a clean line. `rank` comes from the file's name. In a `labeled` file, each line begins
    with a rank."""
    hooked = stamped = compiled = False
    time = None
    at = 0
    if labeled and (match := LABEL.match(text)):
        rank, at = int(match[1]), match.end()
    if (start := text.find("[rank", at)) > at and BEFORE_RANK.match(text[at:start]):
        day = ISO.match(text[at:start].strip())
        time, at = seconds(*day.groups()) if day else None, start
    for _ in range(3):  # tee, torch's rank, and a timestamp, in any order
        if match := RANK.match(text, at):
            rank, at, hooked = int(match[1]), match.end(), True
        elif (match := TEE.match(text, at)) and match[1].lower() not in ("gpu", "stage", "layer"):
            rank, at = (rank if rank is not None else int(match[2])), match.end()
        else:
            break
    if match := (GLOG.match(text, at) or CPP.match(text, at)):
        time = seconds(*match.group(2, 3, 4, 5, 6)) if match[2] else time
        at, stamped = match.end(), True
        compiled = match.re is CPP or match[7].startswith("torch/distributed/")
    elif match := ISO.match(text, at):
        time, stamped = seconds(*match.groups()), True
    if rank is None and (match := NCCL_RANK.search(text, at)):
        rank = int(match[1] or match[2])
    return Line(source, number, text[at:], rank, time, stamped, hooked, compiled)
