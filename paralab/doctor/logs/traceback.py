"""Python's tracebacks, put together again from lines that other ranks' lines may lie between."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paralab.doctor.logs.line import Line

HEADER = "Traceback (most recent call last):"
FRAME = re.compile(r'\s*File "(.+?)", line (\d+)(?:,? in (.*))?$')
CAUSE = "The above exception was the direct cause of the following exception:"
MEANWHILE = "During handling of the above exception, another exception occurred:"
ERROR = re.compile(
    r"\s*([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Iteration|[A-Z]\w*))(?:: |:?$)"
)
LIBRARIES = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "\\lib\\",
    "<frozen",
    "<string>",
    "bin/torchrun",
    "/torch/",
    "importlib",
    "/paralab/observe/",  # around the calls of an observed script
)
SPAWNED = re.compile(
    r"-- Process (\d+) terminated with the following error:"
)  # torch.multiprocessing.spawn
LONGEST = 200  # lines
LONGEST_MESSAGE = (
    8  # lines of an exception's message, where nothing tells them from what the process prints next
)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str
    code: str = ""

    @property
    def own(self) -> bool:
        """Of the user's code, not of a library."""
        return not any(part in self.file for part in LIBRARIES)


@dataclass
class Traceback:
    """`error` is the line that names the exception; `message` that line and what follows, to the
    end."""

    lines: list[Line] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    errors: list[Line] = field(
        default_factory=list
    )  # of a chain, the last printed is the one that ended the process
    reported: bool = False  # quoted in torchrun's report: the process wrote it itself before
    logged: bool = False  # written by a logger: somebody caught it
    followed: int = 0  # lines that its stream wrote afterwards
    caused: int | None = None  # frames of the exception that a following one was raised from
    rank: int | None = None

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
    def kind(self) -> str:
        """The exception's class, without its module."""
        found = ERROR.match(self.error)
        return found[1].rpartition(".")[2] if found else ""

    @property
    def hooked(self) -> bool:
        return self.first.hooked

    @property
    def where(self) -> Frame | None:
        """The innermost frame of the user's code; of an exception raised from another one, the
        frame of the other one."""
        frames = (
            [*self.frames[self.caused :], *self.frames[: self.caused]]
            if self.caused
            else self.frames
        )
        return next((frame for frame in reversed(frames) if frame.own), None)

    @property
    def of_launcher(self) -> bool:
        """The launcher's own, about its children. (A launcher that cannot start has a traceback of
        another kind.)"""
        names = (
            "ChildFailedError",
            "SignalException",
            "ProcessRaisedException",
            "ProcessExitedException",
        )
        return any(name in self.error for name in names)

    def evidence(self) -> tuple[str, ...]:
        """The user's own frame and what was raised."""
        at = self.where
        lines = []
        if at is not None:
            lines += [
                str(line)
                for line in self.lines
                if (m := FRAME.match(line.text)) and (m[1], int(m[2])) == (at.file, at.line)
            ][-1:]
        if (
            self.errors and self.errors[0] is self.first
        ):  # the fault handler's: the error comes first, then the frames
            lines.append(str(self.first))
        elif self.errors:
            start = self.lines.index(self.errors[-1])
            lines += [str(line) for line in self.lines[start : start + 4] if line.text.strip()]
        return tuple(lines)


class Fatal:
    """What Python's fault handler writes when a process dies of a signal: "Fatal Python error:
    Illegal instruction", then the threads, innermost call first; of interest is the one that says
    "Current thread"."""

    FRAME = re.compile(r'\s*File "(.+?)", line (\d+) in (.*)$')

    def __init__(self, line: Line) -> None:
        self.trace = Traceback([line], errors=[line], rank=line.rank)
        self._current = False
        self._patience = 400

    def feed(self, line: Line) -> bool:
        """False when the threads are over."""
        self._patience -= 1
        if "most recent call first" in line.text:
            self._current = line.text.lstrip().startswith(("Current thread", "Stack"))
        elif found := self.FRAME.match(line.text):
            if self._current:
                self.trace.frames.insert(0, Frame(found[1], int(found[2]), found[3]))
                self.trace.lines.append(line)
        elif line.text.strip() and not line.text.lstrip().startswith(("<", "Thread", "...")):
            return False
        return self._patience > 0


class Assembler:
    """The tracebacks of one stream: one rank's lines in one file."""

    def __init__(self) -> None:
        self.done: list[Traceback] = []
        self.fatal: Fatal | None = None
        self.open: Traceback | None = None
        self.previous: Line | None = None
        self._message = False
        self._blank = False

    def feed(self, line: Line) -> bool:
        """Take a line; False if it belongs to no traceback."""
        text = line.text
        if self.fatal is not None:
            if self.fatal.feed(line):
                return True
            self.fatal = None
        if text.startswith("Fatal Python error: "):
            self.close()
            self.fatal = Fatal(line)
            self._keep(self.fatal.trace)
            return True
        if text.endswith(HEADER) or (HEADER in text and len(text) < 200):
            self._begin(line)
            return True
        if self.open is None:
            self._count(line)
            self.previous = line if text.strip() else self.previous
            return False
        taken = self._continue(line)
        if not taken:
            self.close()
            self._count(line)
            self.previous = line if text.strip() else self.previous
        return taken

    def _begin(self, line: Line) -> None:
        if self.open is not None and (self._chained() or "Original Traceback" in line.text):
            if CAUSE in self.open.lines[-1].text or any(
                CAUSE in old.text for old in self.open.lines[-3:]
            ):
                self.open.caused = self.open.caused or len(self.open.frames)
        else:
            self.close()
            self.open = Traceback(rank=line.rank, reported="traceback :" in line.text)
            before = self.previous
            by_logger = before is not None and before.stamped and not before.compiled
            self.open.logged = (
                by_logger
                and before is not None
                and before.number >= line.number - 2
                and not line.hooked
            )
            self.open.logged |= line.stamped
            if before is not None and (found := SPAWNED.match(before.text)):
                self.open.rank, self.open.reported = int(found[1]), True
        self.open.lines.append(line)
        self._message = self._blank = False

    def _chained(self) -> bool:
        return self.open is not None and any(
            CAUSE in old.text or MEANWHILE in old.text for old in self.open.lines[-3:]
        )

    def _continue(self, line: Line) -> bool:
        assert self.open is not None
        text, trace = line.text, self.open
        if len(trace.lines) > LONGEST or (line.stamped and not line.hooked):
            return False
        if not text.strip():
            self._blank = True
            return True
        if found := FRAME.match(text):
            trace.frames.append(Frame(found[1], int(found[2]), found[3] or "?"))
            self._message = False
        elif (
            not self._message and text.startswith("    ") and trace.frames and not ERROR.match(text)
        ):
            if not trace.frames[-1].code:
                last = trace.frames[-1]
                trace.frames[-1] = Frame(last.file, last.line, last.function, text.strip())
        elif (
            not self._message
            and (text.lstrip().startswith("[Previous line") or text.startswith("   "))
            and not ERROR.match(text)
        ):
            pass
        elif not self._message:
            trace.errors.append(line)
            self._message = True
        elif self._message and self._is_over(text, line.hooked):
            return False
        trace.lines.append(line)
        self._blank = False
        return True

    def _is_over(self, text: str, hooked: bool) -> bool:
        """After the message: a rule of torchrun's report, or a blank line that no chained exception
        follows."""
        assert self.open is not None
        if text.startswith(("====", "----", "Failures:")):
            return True
        if hooked or CAUSE in text or MEANWHILE in text or text.startswith(("\t", "  ")):
            return False
        told = len(self.open.lines) - self.open.lines.index(self.open.errors[-1])
        return self._blank or told > LONGEST_MESSAGE

    def _count(self, line: Line) -> None:
        if self.done and line.text.strip():
            self.done[-1].followed += 1

    def close(self) -> None:
        if self.open is not None and (self.open.frames or self.open.errors):
            self._keep(self.open)
        self.open = None
        self._message = self._blank = False

    def _keep(self, trace: Traceback) -> None:
        """Of a job that logs one exception per step, the first ones and the last ones."""
        self.done.append(trace)
        if len(self.done) > 200:
            del self.done[50:150]
