"""Python's tracebacks, assembled from lines that may be interleaved with other ranks' lines.
Users may also paste only the last lines of a traceback, or only the exception."""

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from paralab.analyse import collective_matching as matching
from paralab.doctor.logs.line import Line
from paralab.record.victims import is_victim

HEADER = "Traceback (most recent call last)"
FRAME = re.compile(r'\s*File "(.+?)", line (\d+)(?:,? in (.*))?$')
# Notebooks write `File ~/train.py:12, in main()`. rich draws a box around `/home/train.py:12 in main`.
BOXED_FRAME = re.compile(r"(?:│ |File )(\S+\.py):(\d+),? in ([\w<>.]+)")
BOXED_CODE = re.compile(r"[│ ]*(?:❱|-+>) *\d+ [│ ]*(.*?)[│ ]*$")
ERROR = re.compile(
    r"\s*([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Iteration|[A-Z]\w*))(?:: |:?$)"
)
BARE = re.compile(r"(?:[a-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception): \S")
ROUTINE = re.compile(r"\b(?:INFO|DEBUG)\b")  # no traceback follows a log line like this
FATAL = "Fatal Python error: "
CAUSE = "The above exception was the direct cause of the following exception:"
MEANWHILE = "During handling of the above exception, another exception occurred:"
SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error:")
LIBRARIES = (*matching.LIBRARIES, "\\lib\\", "bin/torchrun", "/torch/", "importlib")
OF_LAUNCHER = re.compile("ChildFailedError|SignalException|Process(?:Raised|Exited)Exception")
TORCH_OR_PYTHON = re.compile(
    r"(?:^|[/\\])torch[/\\]|[/\\]lib[/\\]python3[\d.]*[/\\](?!site-packages|dist-packages)|bin/torchrun|^<|runpy"
)
# The innermost frame of a launcher that reports the exception of another process.
REPORTING = ("torch/multiprocessing/spawn.py", "torch/distributed/launcher/api.py")
LONGEST = 200  # the maximum number of lines in a traceback
LONGEST_BARE = 3  # the same for a message without a traceback
LONGEST_MESSAGE = 8  # the same if nothing separates the message from later output


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str
    code: str = ""
    read: Line | None = field(default=None, compare=False)  # the line of the log

    @property
    def own(self) -> bool:
        return not any(part in self.file for part in LIBRARIES)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" (`{self.code}`)" if self.code else "")


@dataclass
class Traceback:
    lines: list[Line] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    errors: list[Line] = field(default_factory=list)  # in a chain, the last one killed the process
    reported: bool = False  # quoted in torchrun's report, after the process printed it
    logged: bool = False  # a logger wrote it, so the program caught the exception
    followed: int = 0  # number of lines that its stream printed after it
    caused: int = 0  # number of frames of the exception that caused the next one
    rank: int | None = None
    header: Literal["", "plain", "boxed"] = ""  # "Traceback …", or a notebook's or rich's header

    @property
    def first(self) -> Line:
        return self.lines[0]

    @property
    def error(self) -> str:
        return self.errors[-1].text.strip() if self.errors else ""

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    @property
    def message(self) -> list[Line]:
        return self.lines[self.lines.index(self.errors[-1]) :] if self.errors else []

    @property
    def headline(self) -> str:
        """Return the first line of the exception, and also the second if the first ends in ":"."""
        lines = self.message[: 2 if self.error.endswith(":") else 1]
        return " ".join(line.text.strip() for line in lines)

    @property
    def kind(self) -> str:
        found = ERROR.match(self.error)
        return found[1].rpartition(".")[2] if found else ""

    @property
    def is_fatal_signal(self) -> bool:
        return self.error.startswith(FATAL)

    @property
    def where(self) -> Frame | None:
        """Return the innermost frame of user code; for `raise … from …`, prefer the original
        exception's. Without user code, return the innermost frame outside torch, because a library
        can be the program."""
        frames = [*self.frames[self.caused :], *self.frames[: self.caused]]
        if self.header or not any(frame.function == "<module>" for frame in frames[1:]):
            frames.reverse()  # innermost frame first, as editors print it
        outside = (frame for frame in frames if not TORCH_OR_PYTHON.search(frame.file))
        return next((frame for frame in frames if frame.own), next(outside, None))

    @property
    def of_launcher(self) -> bool:
        last = self.frames[-1] if self.frames else None
        reports = last and last.file.endswith(REPORTING) and last.code.startswith("raise ")
        return bool(reports or OF_LAUNCHER.search(self.error))

    @property
    def of_victim(self) -> bool:
        frames = "\n".join(frame.file for frame in self.frames)
        return is_victim("\n".join(line.text for line in self.errors), frames)

    def evidence(self) -> tuple[str, ...]:
        at = self.where
        frame = [at.read] if at and at.read else []
        # The fault handler prints the error first, then the frames.
        error = [self.first] if self.is_fatal_signal else self.message[:4]
        return tuple(str(line) for line in (*frame, *error) if line.text.strip())


class Assembler:
    """The tracebacks of one stream: one rank's lines in one file."""

    def __init__(self) -> None:
        self.done: list[Traceback] = []
        self.open: Traceback | None = None
        self._previous: Line | None = None
        self._message = False  # True inside the exception's message
        self._blank = False
        self._current = False  # True inside the thread that the fault handler marks as current
        self._prefix: re.Pattern[str] | None = None  # a prefix that someone added to each line

    def feed(self, line: Line) -> bool:
        """Process a line. Return False if it does not belong to a traceback."""
        line = self._without_prefix(line)
        text = line.text
        if HEADER in text and len(text) < 200 + len(HEADER):
            self._begin(line)
            return True
        if self.open is not None and self._continue(line):
            return True
        self.close()
        if text.startswith(FATAL) or (not line.stamped and (FRAME.match(text) or BARE.match(text))):
            self._open(line)
            self._current = False
            return self._continue(line)
        if self.done and text.strip():
            self.done[-1].followed += 1
        self._previous = line if text.strip() else self._previous
        return False

    def _without_prefix(self, line: Line) -> Line:
        """Remove a prefix (a host, a quotation mark, a collector's timestamp). The prefix of
        "Traceback" recurs in the next lines, possibly with different numbers."""
        start = line.text.find(HEADER)
        if start > 0:
            shape = r"\d+".join(map(re.escape, re.split(r"\d+", line.text[:start])))
            self._prefix = re.compile(shape)
        elif self.open and self._prefix and (found := self._prefix.match(line.text)):
            self.open.logged &= not line.stamped  # a logger adds a timestamp only to the first line
            return replace(line, text=line.text[found.end() :], stamped=False)
        return line

    def skip(self, number: int) -> None:
        """Count skipped lines, which show that the process continued after its last traceback."""
        if self.done and self.open is None:
            self.done[-1].followed += number

    def close(self) -> None:
        if self.open is not None and (self.open.frames or self.open.errors):
            self.done.append(self.open)
            if len(self.done) > 200:  # for example, a job that logs one exception per step
                del self.done[50:150]
        self.open, self._message, self._blank = None, False, False

    def _begin(self, line: Line) -> None:
        before = self.open.lines[-3:] if self.open else []
        caused = any(CAUSE in old.text for old in before)
        if self.open is None or (
            not (caused or any(MEANWHILE in old.text for old in before))
            and "Original Traceback" not in line.text
        ):
            self._open(line)
        elif caused:
            self.open.caused = self.open.caused or len(self.open.frames)
        assert self.open is not None
        self.open.header = "plain" if f"{HEADER}:" in line.text else "boxed"
        self.open.lines.append(line)
        self._message = self._blank = False

    def _open(self, line: Line) -> None:
        self.close()
        self.open = Traceback(rank=line.rank, reported="traceback :" in line.text)
        before = self._previous
        if before is None:
            self.open.logged = line.stamped
            return
        by_logger = before.stamped and not before.compiled and before.number >= line.number - 2
        by_logger &= not ROUTINE.search(before.text)
        self.open.logged = line.stamped or (by_logger and not line.hooked)
        if found := SPAWNED.match(before.text):
            self.open.rank, self.open.reported = int(found[1]), True

    def _continue(self, line: Line) -> bool:
        assert self.open is not None
        text, trace = line.text, self.open
        if len(trace.lines) > LONGEST or (line.stamped and not line.hooked):
            return False
        if trace.is_fatal_signal:
            return self._continue_fatal(line)
        if not text.strip():
            self._blank = True
            return True
        if found := FRAME.match(text) or BOXED_FRAME.match(text):
            trace.frames.append(Frame(found[1], int(found[2]), found[3] or "?", "", line))
            self._message = False
        elif self._message:
            if self._is_over(line):
                return False
        elif trace.header == "boxed":
            if trace.frames and (found := BOXED_CODE.match(text)):
                trace.frames[-1] = replace(trace.frames[-1], code=found[1])
            elif ERROR.match(text) and ":" in text:
                trace.errors.append(line)
                self._message = True
        elif text.startswith("   ") and trace.frames and not ERROR.match(text):
            last = trace.frames[-1]  # the frame's code, or the marks below the code
            trace.frames[-1] = replace(last, code=last.code or text.strip())
        elif not text.lstrip().startswith("[Previous line"):
            if trace.lines and not trace.header and not ERROR.match(text):
                return False  # frames from a stack dump or a truncated excerpt
            trace.errors.append(line)
            self._message = True
        trace.lines.append(line)
        self._blank = False
        return True

    def _continue_fatal(self, line: Line) -> bool:
        """Process a line after "Fatal Python error: …". All threads follow, each with its innermost
        call first. Only the frames of the current thread matter."""
        assert self.open is not None
        text = line.text
        if "most recent call first" in text:
            self._current = text.lstrip().startswith(("Current thread", "Stack"))
        elif found := FRAME.match(text):
            if self._current:
                frame = Frame(found[1], int(found[2]), found[3] or "?", "", line)
                self.open.frames.insert(0, frame)
                self.open.lines.append(line)
        else:
            return not text.strip() or text.lstrip().startswith(("<", "Thread", "..."))
        return True

    def _is_over(self, line: Line) -> bool:
        """Return whether the traceback is over: torchrun's report or a blank line follows."""
        assert self.open is not None
        text = line.text
        if text.startswith(("====", "----", "Failures:")):
            return True
        if BARE.match(text) and not line.hooked:
            return True  # this line belongs to another process
        if line.hooked or CAUSE in text or MEANWHILE in text or text.startswith(("\t", "  ")):
            return False
        num_lines = len(self.open.lines) - self.open.lines.index(self.open.errors[-1])
        bare = self.open.lines[0] is self.open.errors[-1]
        return self._blank or num_lines > (LONGEST_BARE if bare else LONGEST_MESSAGE)
