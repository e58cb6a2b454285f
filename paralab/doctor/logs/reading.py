"""Read the logs of a job, each file once and in blocks, so that a log of any length fits in
memory.

It keeps the lines with a keyword, and assembles tracebacks and exits. In a block without keywords,
only the last lines are parsed, to find out where each rank was."""

import gzip
import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from paralab.analyse.collective_matching import from_flight_recorder
from paralab.doctor.logs import dumps
from paralab.doctor.logs.exits import Exits
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import LABEL, Line, clean, parse
from paralab.doctor.logs.traceback import Assembler
from paralab.errors import UsageError

# The keywords are lowercase and general, because messages change from version to version.
WORDS = (
    *(b"error", b"exception", b"warn", b"nccl", b"watchdog", b"signal", b"exitcode", b"failed"),
    *(b"failures:", b"root cause", b"  rank  ", b"  host  ", b"  time  ", b"  traceback :"),
    *(b"kill", b"fault", b"fatal", b"timeout", b"timed out", b"terminate", b"what():", b"srun"),
    *(b"slurm", b"oom", b"out of memory", b"xid", b"ecc ", b"mismatch", b"by peer", b"broken pipe"),
    *(b"in use", b"addrinuse", b"assertion", b'file "', b"illegal instruction", b"key(s)"),
    *(b"strides() =", b"omp_num_threads", b"did not receive", b"clients joined", b"unable to"),
    *(b"imbalance", b"autograd kernel", b"process group", b"cancelled", b"dataloader", b"detected"),
    b"expected",
)
PASTED = 300  # keep this many lines at the start of each file, even without a keyword
BLOCK = 1 << 18  # bytes
LONGEST_LINE = 1 << 16
SAME = 200  # the maximum number of lines to keep that differ only in their numbers
TAIL = 40  # always parse this many lines at the end of a block
BEFORE = 3  # also parse this many lines before a keyword, for the time and the logger
FULLY = 20_000  # parse every line up to this one
CONTROL = bytes({*range(32)} - {*b"\t\n\r\x1b\b\f"})
EVERY = re.compile(  # every rank prints its own message
    rb"atchdog|enqueued|exitcode|closing signal|Unable to shutdown|srun: |^  (?:time|host|rank) "
)
LAUNCHER = re.compile(r"torch/distributed/(?:run|elastic|launcher|agent)")
MENTIONED = re.compile(r"\brank[ _:=]{0,2}(\d{1,5})\b", re.IGNORECASE)
WORLD = re.compile(r"\bworld[ _-]?size[ =:]+(\d{1,6})\b|nproc[_-]per[_-]node[ =]+(\d+)", re.I)
OF_FILE = re.compile(
    r"attempt_\d+[/\\](\d+)[/\\](?:stdout\.log|stderr\.log|error\.json)$"
    r"|(?<![A-Za-z])rank[_.-]?(\d+)(?=\D|$)(?!.*[/\\])"
    r"|(?:task|err|out|log)[._-](\d+)$"
)
LOG = re.compile(r"\.(?:log|err|out|txt|json)$|trace_rank|^slurm-")


def read_logs(paths: Iterable[str | Path]) -> Logs:
    """Read these files together. "-" is standard input; a folder means all logs in it."""
    logs = Logs()
    for name in dict.fromkeys(str(path) for path in paths):
        for path in _files(name):
            _read(path, logs)
    logs.merge()
    return logs


def read_texts(texts: Mapping[int, str]) -> Logs:
    logs = Logs()
    for rank, text in texts.items():
        _File(f"rank {rank}", logs, rank).read(io.BytesIO(text.encode()))
    logs.merge()
    return logs


def rank_of(name: str) -> int | None:
    """Return the rank in a file's name: torchrun's `attempt_0/1/stderr.log`, `rank1.err`,
    `nccl_trace_rank_1`, `err.1`."""
    match = OF_FILE.search(name)
    return int(next(group for group in match.groups() if group is not None)) if match else None


def _files(name: str) -> Iterator[str]:
    path = Path(name)
    if name == "-" or path.is_file():
        yield name
        return
    if not path.exists():
        raise UsageError(
            f"There is no log {name}.",
            fix="pass the files that the job wrote, or - to read from a pipe",
        )
    files = [file for file in sorted(path.rglob("*")) if LOG.search(file.name) and file.is_file()]
    if not files and path.is_dir():
        fix = "logs end in .log, .err, .out, .txt, or .json; pass other files by name"
        if any(path.glob("*.py")):
            fix = f"pass scripts by name: {name}/train.py"
        raise UsageError(f"The folder {name} contains no logs.", fix=fix)
    yield from map(str, files or [path])


def _read(name: str, logs: Logs) -> None:
    if name == "-":
        _File("stdin", logs).read(sys.stdin.buffer)
        return
    path = Path(name)
    try:
        opened: IO[bytes] = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[assignment]  # noqa: SIM115
        with opened as file:
            start = file.read(4096)
            file.seek(0)
            if dumps.looks_like_dump(start, name):
                dump = dumps.read_dump(path, start)
                if dump is not None and _take_dump(name, dump, logs):
                    return
            _File(name, logs).read(file)
    except EOFError:  # a truncated compressed log
        return
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}.") from error


def _take_dump(name: str, dump: dict[str, object], logs: Logs) -> bool:
    rank = rank_of(name)
    if text := dumps.elastic_error(dump):
        known = len(logs.tracebacks)
        _File(name, logs, rank).read(io.BytesIO(text.encode()))
        for trace in logs.tracebacks[known:]:
            trace.reported = True
        return True
    if "entries" not in dump:
        return False
    recorded = dump.get("rank")
    rank = recorded if isinstance(recorded, int) else rank
    rank = rank if rank is not None else len(logs.dumps)
    calls = from_flight_recorder(dumps.entries(dump))
    # A send or recv has no number.
    logs.dumps[rank] = [call for call in calls if call.number is not None]
    logs.sources[name], logs.dump_names[rank] = rank, name
    return True


class _File:
    def __init__(self, name: str, logs: Logs, rank: int | None = None) -> None:
        self.name, self.logs = name, logs
        self.rank = logs.sources[name] = rank if rank is not None else rank_of(name)
        self.number = 0
        self.labeled = False
        self.streams: dict[int | None, Assembler] = {}
        self.reports: dict[int | None, Exits] = {}
        self.clock: float | None = None  # the last timestamp; lines without one inherit it
        self.same: Counter[bytes] = Counter()  # counts lines, ignoring numbers in them

    def read(self, file: IO[bytes]) -> None:
        rest = b""
        while block := file.read(BLOCK):
            block = rest + block
            cut = block.rfind(b"\n") + 1
            if not cut and len(block) < BLOCK:
                rest = block
                continue
            if not cut:  # this is an endless progress bar, or not text
                cut = block.rfind(b"\r") + 1 or len(block)
            rest = block[cut:]
            self._block(block[:cut])
        if rest:
            self._block(rest)
        for stream in self.streams.values():
            stream.close()
            self.logs.tracebacks += stream.done
        self.logs.reports += self.reports.values()
        self.logs.lengths[self.name] = self.number
        if not self.number:
            self.logs.notes.append(f"{self.name} is empty: the job wrote nothing to it.")

    def _block(self, block: bytes) -> None:
        if b"\0" in block[:4096] and block.count(0) > len(block) // 4:
            block = block.replace(b"\0", b"")  # UTF-16, or a file copied while it was written
        if not self.number:
            self.labeled = _is_labeled(block)
            if len(block[:4096].translate(None, CONTROL)) < 0.95 * len(block[:4096]):
                self.logs.notes.append(f"{self.name} does not look like text.")
        lower = block.lower()
        present = [word for word in WORDS if word in lower]
        end = self.number + block.count(b"\n") + (not block.endswith(b"\n"))
        if not present and not self._busy() and self.number > FULLY:
            block = block[-TAIL * 200 :]
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        start, self.number = end - len(lines), end
        done = 0  # all lines before this one are processed
        for index, raw in enumerate(lines):
            near_an_end = start + index < FULLY or index >= len(lines) - TAIL
            keep = start + index < PASTED or any(word in raw.lower() for word in present)
            keep = keep and self._is_new(raw)
            if keep or near_an_end or self._busy():
                first = max(done, index - BEFORE)
                if first > done and (stream := self.streams.get(self.rank)):
                    stream.skip(first - done)
                for at in range(first, index + 1):
                    self._line(lines[at], start + at + 1, keep and at == index)
                done = index + 1

    def _is_new(self, raw: bytes) -> bool:
        """Return False for a line if many lines before it differ from it only in numbers."""
        shape = raw.translate(None, b"0123456789.")
        self.same[shape] += 1
        return self.same[shape] <= SAME or bool(EVERY.search(raw))

    def _busy(self) -> bool:
        return any(stream.open is not None for stream in self.streams.values())

    def _line(self, raw: bytes, number: int, keep: bool) -> None:
        text = clean(raw[-LONGEST_LINE:])
        line = parse(self.name, number, text, self.rank, self.labeled)
        if line.time is None and self.clock is not None:
            line = replace(line, time=self.clock)
        self.clock = line.time
        stream = self.streams.setdefault(line.rank, Assembler())
        report = self.reports.setdefault(line.rank if self.labeled else None, Exits())
        if stream.feed(line):
            if stream.open is not None and stream.open.reported and stream.open.rank is None:
                stream.open.rank = report.entry_rank
            return
        if not text:
            return
        self._notice(line)
        if keep or text.startswith("  "):
            report.feed(line)
        if keep:
            self.logs.lines.append(line)

    def _notice(self, line: Line) -> None:
        if LAUNCHER.search(line.text) or line.text.startswith(
            ("  ", "Failures", "Root Cause", "srun: ", "slurmstepd")
        ):
            return
        if (match := WORLD.search(line.text)) and (number := int(match[1] or match[2])) > 0:
            self.logs.worlds.add(number)
        rank = line.rank
        if rank is None and (match := MENTIONED.search(line.text)):
            rank = int(match[1])
        if rank is not None:
            self.logs.last[rank] = line


def _is_labeled(block: bytes) -> bool:
    """Return whether `srun -l` printed the task's number before every line. Other numbers, such as
    counters, rarely repeat."""
    lines = [clean(raw) for raw in block[:LONGEST_LINE].splitlines() if raw.strip()][:400]
    labels = [found[1] for line in lines if (found := LABEL.match(line))]
    most = len(labels) >= 3 and len(labels) >= 0.9 * len(lines)
    return most and len(set(labels)) <= len(labels) / 2
