"""Reading what a job has printed: every file once, in blocks, so that a log of any length fits into
memory.

Of a block that holds none of the needles only the last lines are looked at (where was each rank?).
Of the others, tracebacks, exits and lines with a needle are kept. In the end everything lies on one
clock, where there are stamps."""

from __future__ import annotations

import gzip
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from paralab.analyse.collective_matching import from_flight_recorder
from paralab.doctor.logs import dumps
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import LABEL, Line, clean, parse
from paralab.doctor.logs.needles import NEEDLES, STRUCTURE
from paralab.doctor.logs.report import Ends
from paralab.doctor.logs.traceback import HEADER, Assembler
from paralab.errors import UsageError

BLOCK = 1 << 18  # bytes
LONGEST_LINE = 1 << 16
SAME = 300  # lines kept per needle
TAIL = 40  # lines at the end of a block that are looked at whatever they say,
BEFORE = 3  # and lines before one with a needle: they tell the time, and whether a logger wrote it
FULLY = 20_000  # lines: a file of up to this length is read line by line
LAUNCHER = re.compile(r"torch/distributed/(?:run|elastic|launcher|agent)")
MENTIONED = re.compile(r"\brank[ _:=]{0,2}(\d{1,5})\b", re.IGNORECASE)
WORLD = re.compile(
    r"\bworld[ _-]?size[ =:]+(\d{1,6})\b|nproc[_-]per[_-]node[ =]+(\d+)", re.IGNORECASE
)
OF_FILE = re.compile(
    r"attempt_\d+[/\\](\d+)[/\\](?:stdout\.log|stderr\.log|error\.json)$"
    r"|(?<![A-Za-z])rank[_.-]?(\d+)(?=\D|$)(?!.*[/\\])"
    r"|(?:task|err|out|log)[._-](\d+)$"
)


def read_logs(paths: Iterable[str | Path]) -> Logs:
    """What these files say together. "-" is standard input; a folder means all logs in it."""
    logs = Logs()
    names = list(dict.fromkeys(str(path) for path in paths))
    for name in names:
        for path in _files(name):
            _read(path, logs)
    logs.merge()
    return logs


def rank_of(name: str) -> int | None:
    """The rank that a file's name tells: `attempt_0/1/stderr.log` of torchrun, `rank1.err`,
    `nccl_trace_rank_1`, `err.1`."""
    found = OF_FILE.search(name)
    return int(next(group for group in found.groups() if group is not None)) if found else None


def _files(name: str) -> Iterator[str]:
    if name != "-" and not Path(name).exists():
        raise UsageError(
            f"There is no log {name}.",
            fix="give the files that the job has written, or - to read them from a pipe",
        )
    if name == "-" or not Path(name).is_dir():
        yield name
        return
    kinds = (".log", ".err", ".out", ".txt", ".json")
    found = [path for path in sorted(Path(name).rglob("*")) if path.is_file()]
    found = [
        path
        for path in found
        if path.suffix in kinds or "trace_rank" in path.name or path.name.startswith("slurm-")
    ]
    if not found:
        scripts = any(Path(name).glob("*.py"))
        fix = (
            f"scripts are given by name: {name}/train.py"
            if scripts
            else f"logs end in {', '.join(kinds)}; give other files by name"
        )
        raise UsageError(f"The folder {name} holds no logs.", fix=fix)
    yield from map(str, found)


def _read(name: str, logs: Logs) -> None:
    if name == "-":
        logs.add_source("stdin", None)
        _File("stdin", logs).read(sys.stdin.buffer)
        return
    path = Path(name)
    try:
        opened: IO[bytes] = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[assignment]  # noqa: SIM115
        with opened as file:
            start = file.read(4096)
            file.seek(0)
            if dumps.looks_like_pickle(start) or dumps.looks_like_json(start, name):
                dump = dumps.read_dump(path, start)
                if dump is not None and _take_dump(name, dump, logs):
                    return
            logs.add_source(name, rank_of(name))
            _File(name, logs).read(file)
    except (OSError, EOFError) as error:  # EOFError: a compressed log that is torn off
        if not isinstance(error, EOFError):
            raise UsageError(f"{name} cannot be read: {error.strerror or error}.") from error


def _take_dump(name: str, dump: dict[str, object], logs: Logs) -> bool:
    rank = rank_of(name)
    if told := dumps.elastic_error(dump):
        text, _ = told
        logs.add_source(name, rank)
        stream = Assembler()
        for number, line in enumerate(text.splitlines(), start=1):
            stream.feed(Line(name, number, line, rank))
        stream.close()
        for trace in stream.done:
            trace.reported = True
        logs.tracebacks += stream.done
        return True
    if "entries" not in dump:
        return False
    said = dump.get("rank")
    rank = said if isinstance(said, int) else rank
    rank = rank if rank is not None else len(logs.dumps)
    calls = from_flight_recorder(dumps.entries(dump))
    logs.dumps[rank] = [call for call in calls if call.number is not None]  # no send, no recv
    logs.add_source(name, rank)
    logs.dump_names[rank] = name
    return True


class _File:
    """One file on its way through."""

    def __init__(self, name: str, logs: Logs) -> None:
        self.name, self.logs = name, logs
        self.rank = rank_of(name)
        self.number = 0
        self.labelled = False
        self.streams: dict[int | None, Assembler] = {}
        self.ends: dict[int | None, Ends] = {}
        self.clock: float | None = (
            None  # lines without a stamp lie where the stamped line before them lies
        )
        self.kept: Counter[bytes] = Counter()
        self.needles = list(NEEDLES)
        self.busy = False  # inside a traceback

    def read(self, file: IO[bytes]) -> None:
        rest = b""
        first = True
        while block := file.read(BLOCK):
            block = rest + block
            cut = block.rfind(b"\n") + 1
            if not cut and len(block) < BLOCK:
                rest = block
                continue
            if not cut:  # a progress bar without end, or no text at all
                cut = block.rfind(b"\r") + 1 or len(block)
            whole, rest = block[:cut], block[cut:]
            if first:
                self.labelled = _is_labelled(whole)
                first = False
            self._block(whole)
        if rest:
            if first:
                self.labelled = _is_labelled(rest)
            self._block(rest)
        for stream in self.streams.values():
            stream.close()
            self.logs.tracebacks += stream.done
        self.logs.ends += self.ends.values()

    def _block(self, block: bytes) -> None:
        if b"\0" in block[:4096] and block.count(0) > len(block) // 4:
            block = block.replace(b"\0", b"")  # UTF-16, or a file that was copied while it grew
        present = [needle for needle in self.needles if needle in block]
        start = self.number
        self.number += block.count(b"\n") + (not block.endswith(b"\n"))
        if not present and not self.busy and start > FULLY:
            block = block[-TAIL * 200 :]
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        start = self.number - len(lines)
        seen = 0  # lines before this one are done with
        for index, raw in enumerate(lines):
            near_an_end = start + index < FULLY or index >= len(lines) - TAIL
            if self.busy or near_an_end or any(needle in raw for needle in present):
                first = max(seen, index - BEFORE)
                self._skip(first - seen)
                for at in range(first, index + 1):
                    self._line(lines[at], present, start + at + 1)
                seen = index + 1
        self.needles = [
            needle for needle in self.needles if self.kept[needle] < SAME or needle in STRUCTURE
        ]

    def _skip(self, number: int) -> None:
        """Lines that nobody looks at still tell that the process went on after its last
        traceback."""
        stream = self.streams.get(self.rank)
        if number and stream is not None and stream.done:
            stream.done[-1].followed += number

    def _line(self, raw: bytes, present: list[bytes], number: int) -> None:
        text = clean(raw if len(raw) < LONGEST_LINE else raw[-LONGEST_LINE:])
        if HEADER in text and (at := text.rfind("[rank", 0, text.find(HEADER))) > 0:
            text = text[at:]  # behind a progress bar
        line = parse(self.name, number, text, self.rank, None, self.labelled)
        if line.time is not None:
            self.clock = line.time
        elif self.clock is not None:
            line = replace(line, time=self.clock)
        stream = self.streams.setdefault(line.rank, Assembler())
        ends = self.ends.setdefault(line.rank if self.labelled else None, Ends())
        taken = stream.feed(line)
        if stream.open is not None and stream.open.reported and stream.open.rank is None:
            stream.open.rank = ends.entry_rank
        self.busy = any(
            other.open is not None or other.fatal is not None for other in self.streams.values()
        )
        if not text or taken:
            return
        self._notice(line)
        needle = next((needle for needle in present if needle in raw), None)
        if needle is not None or text.startswith("  "):
            ends.feed(line)
        if needle is not None:
            self.kept[needle] += 1
            if self.kept[needle] <= SAME:
                self.logs.lines.append(line)

    def _notice(self, line: Line) -> None:
        """Where each rank was last, and which ranks there are."""
        if LAUNCHER.search(line.text) or line.text.startswith(
            ("  ", "Failures", "Root Cause", "srun: ", "slurmstepd")
        ):
            return
        if (found := WORLD.search(line.text)) and (number := int(found[1] or found[2])) > 0:
            self.logs.worlds.add(number)
        rank = line.rank
        if rank is None and (found := MENTIONED.search(line.text)):
            rank = int(found[1])
        if rank is not None and line.text.strip():
            self.logs.last[rank] = line


def _is_labelled(block: bytes) -> bool:
    """`srun -l` writes the task's number before every line. Not so numbers that count: those seldom
    come twice."""
    lines = [clean(raw) for raw in block[:LONGEST_LINE].splitlines() if raw.strip()][:400]
    labels = [found[1] for line in lines if (found := LABEL.match(line))]
    return (
        len(labels) >= 3 and len(labels) >= 0.9 * len(lines) and len(set(labels)) <= len(labels) / 2
    )
