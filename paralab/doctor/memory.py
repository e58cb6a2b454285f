"""The Python stacks of another process, read from its memory: it is not stopped, nothing is
injected, and it need not cooperate.

Where the fields of CPython's structures lie differs between versions. They are not written down
here but measured: in this process the same structures are at hand, with known contents, so each
field is searched where its value must be. That works for every process that runs the same
interpreter as this one (the same file). For others, and where the measuring fails, `Unreadable`
says so.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType

MOST_FRAMES = 200
MOST_THREADS = 200
WORD = struct.Struct("<Q")


class Unreadable(Exception):
    """Why the stacks of a process could not be read."""


@dataclass(frozen=True)
class Frame:
    """As a testimony has it; innermost last in a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes. `cframe`: of the pointer to it in the thread's state, None where that holds
    the current frame itself."""

    interpreter: int  # in _PyRuntime
    threads: int  # in the interpreter's state
    next: int  # in the thread's state
    native_id: int
    cframe: int | None
    current: int
    code: int  # in the frame
    previous: int
    instruction: int
    first_instruction: int  # in the code object
    filename: int
    name: int
    line_table: int
    first_line: int
    text: int  # in a str of ASCII


def stacks(pid: int) -> dict[int, list[Frame]]:
    """Thread number (as the system counts; the main thread's is the process's) -> its frames,
    outermost first."""
    layout = _measured()
    where = _runtime_in(pid)
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError as error:
        raise Unreadable(
            f"the memory of process {pid} may not be read ({error.strerror}): it belongs to another user, or ptrace is off"
        ) from None
    try:
        return _Target(memory, layout, where).stacks()
    except (OSError, struct.error, UnicodeError, ValueError, OverflowError) as error:
        raise Unreadable(
            f"the memory of process {pid} does not hold what was expected ({error})"
        ) from None
    finally:
        os.close(memory)


class _Target:
    def __init__(self, memory: int, layout: Layout, runtime: int) -> None:
        self.memory, self.layout, self.runtime = memory, layout, runtime

    def stacks(self) -> dict[int, list[Frame]]:
        found: dict[int, list[Frame]] = {}
        thread = self.word(self.word(self.runtime + self.layout.interpreter) + self.layout.threads)
        while thread and len(found) < MOST_THREADS:
            found[self.word(thread + self.layout.native_id)] = list(
                reversed(list(self.frames(thread)))
            )
            thread = self.word(thread + self.layout.next)
        return found

    def frames(self, thread: int) -> Iterator[Frame]:
        holder = thread if self.layout.cframe is None else self.word(thread + self.layout.cframe)
        frame = self.word(holder + self.layout.current) if holder else 0
        for _ in range(MOST_FRAMES):
            if not frame:
                return
            if found := self.frame(frame):
                yield found
            frame = self.word(frame + self.layout.previous)

    def frame(self, frame: int) -> Frame | None:
        code = self.word(frame + self.layout.code)
        try:
            file = self.text(self.word(code + self.layout.filename))
            name = self.text(self.word(code + self.layout.name))
        except (OSError, ValueError, OverflowError):
            return None  # a frame of the interpreter's own, without code
        if file == "<shim>":  # where C calls into Python
            return None
        if file.startswith("<frozen") or not file:
            return Frame(file, 0, name)
        at = self.word(frame + self.layout.instruction) - code - self.layout.first_instruction
        table = self.word(code + self.layout.line_table)
        size = self.word(table + 16)
        if size > 1 << 20:
            return None
        first = struct.unpack("<i", self.read(code + self.layout.first_line, 4))[0]
        return Frame(file, _line(self.read(table + 32, size), first, at), name)

    def text(self, address: int) -> str:
        length = self.word(address + 16)
        if not address or length > 4096:
            raise ValueError("no text")
        state = self.read(address + 32, 1)[0]
        offset, width, encoding = _text_kinds().get(
            state & _text_mask(), (self.layout.text, 1, "ascii")
        )
        return self.read(address + offset, length * width).decode(encoding, errors="replace")

    def word(self, address: int) -> int:
        return int(WORD.unpack(self.read(address, 8))[0])

    def read(self, address: int, size: int) -> bytes:
        raw = os.pread(self.memory, size, address)
        if len(raw) != size:
            raise OSError(f"nothing at {address:#x}")
        return raw


def _line(table: bytes, first: int, at: int) -> int:
    """Decoded by a code object of ours that is given the other one's table."""
    code = (lambda: None).__code__.replace(
        co_linetable=table, co_firstlineno=first, co_code=bytes(2 * max(1, at // 2 + 1))
    )
    for start, end, line in code.co_lines():
        if line is not None and start <= at < end:
            return line
    return first


@lru_cache(maxsize=1)
def _text_samples() -> dict[int, tuple[int, int, str]]:
    """State of a str -> (where its letters begin, bytes per letter, encoding), for letters of each
    width."""
    found = {}
    for letter, width, encoding in (
        ("a", 1, "ascii"),
        ("é", 1, "latin-1"),
        ("ł", 2, "utf-16-le"),
        ("😀", 4, "utf-32-le"),
    ):
        sample = "".join([letter] * 3)
        found[_own(id(sample) + 32, 1)[0]] = (sys.getsizeof(sample) - 4 * width, width, encoding)
    return found


@lru_cache(maxsize=1)
def _text_mask() -> int:
    """The bits of the state that tell the widths apart; the others (interned or not) say nothing
    about the letters."""
    states = list(_text_samples())
    mask = 0
    for state in states:
        mask |= state ^ states[0]
    return mask


@lru_cache(maxsize=1)
def _text_kinds() -> dict[int, tuple[int, int, str]]:
    return {state & _text_mask(): kind for state, kind in _text_samples().items()}


# --- measuring
# -------------------------------------------------------------------------------------------------------------------


def _own(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def _word(address: int) -> int:
    return int(WORD.unpack(_own(address, 8))[0])


def _found(address: int, size: int, is_it: Callable[[int], bool], what: str) -> int:
    raw = _own(address, size)
    for offset in range(0, size - 7, 8):
        if is_it(WORD.unpack_from(raw, offset)[0]):
            return offset
    raise Unreadable(f"{what} was not found in the structures of Python {sys.version.split()[0]}")


@lru_cache(maxsize=1)
def _measured() -> Layout:
    """With a second thread that stands still at a known place."""
    if sys.implementation.name != "cpython" or sys.maxsize < 2**32 or sys.version_info >= (3, 14):
        raise Unreadable(
            f"Python {sys.version.split()[0]} lays out its frames in a way that is not known here"
        )
    seen: dict[str, int] = {}
    ready, over = threading.Event(), threading.Event()

    def stand_still() -> None:
        seen["state"] = _thread_state()
        seen["native"] = threading.get_native_id()
        ready.set()
        over.wait()

    thread = threading.Thread(target=stand_still, daemon=True)
    thread.start()
    try:
        if not ready.wait(5):
            raise Unreadable("a thread could not be started")
        return _layout(seen, thread)
    finally:
        over.set()
        thread.join(5)


def _layout(seen: dict[str, int], thread: threading.Thread) -> Layout:
    api = ctypes.pythonapi
    api.PyInterpreterState_Main.restype = ctypes.c_void_p
    runtime, interpreter = _runtime(), int(api.PyInterpreterState_Main())
    main, other = _thread_state(), seen["state"]
    at_interpreter = _found(runtime, 1024, lambda word: word == interpreter, "the interpreter")
    at_threads = _found(interpreter, 16384, lambda word: word == other, "the list of threads")
    at_next = _next(other, main)
    native = _found(other, 512, lambda word: word == seen["native"], "the thread's number")
    frame = sys._current_frames()[thread.ident or 0]
    while frame.f_code.co_name != "stand_still" and frame.f_back:
        frame = frame.f_back
    inner, back = _inner(frame), _inner(frame.f_back)  # type: ignore[arg-type]
    top = _inner(sys._current_frames()[thread.ident or 0])
    cframe, current = _current(other, top)
    previous = _found(inner, 128, lambda word: word == back, "the calling frame")
    at_code = _found(inner, 128, lambda word: word == id(frame.f_code), "the frame's code")
    code = id(frame.f_code)
    size = frame.f_code.__sizeof__()
    instruction = _found(
        inner, 128, lambda word: code < word < code + size + 512, "the instruction"
    )
    first = _word(inner + instruction) - frame.f_lasti - code
    return Layout(
        at_interpreter,
        at_threads,
        at_next,
        native,
        cframe,
        current,
        at_code,
        previous,
        instruction,
        first,
        _in_code(frame.f_code, id(frame.f_code.co_filename), "the file's name"),
        _in_code(frame.f_code, id(frame.f_code.co_name), "the function's name"),
        _line_table(),
        _first_line(),
        sys.getsizeof("") - 1,
    )


def _next(newest: int, main: int) -> int:
    """Where a thread's state leads to the next one: the way from the newest thread that comes to
    the main one, past all others."""
    memory = os.open(
        "/proc/self/mem", os.O_RDONLY
    )  # a wrong way leads nowhere, and must not be followed by a pointer of ours
    try:
        for offset in range(0, 64, 8):
            state = newest
            for _ in range(MOST_THREADS):
                try:
                    state = WORD.unpack(os.pread(memory, 8, state + offset))[0]
                except (OSError, struct.error, OverflowError):
                    break
                if state == main:
                    return offset
    finally:
        os.close(memory)
    raise Unreadable("the next thread was not found")


def _current(state: int, frame: int) -> tuple[int | None, int]:
    """Where the thread's state leads to its innermost frame: itself (3.13), or through another
    structure (3.11, 3.12)."""
    raw = _own(state, 256)
    for offset in range(0, 256, 8):
        if WORD.unpack_from(raw, offset)[0] == frame:
            return None, offset
    mapped = _mappings(os.getpid())
    for offset in range(0, 256, 8):
        pointer = WORD.unpack_from(raw, offset)[0]
        if any(start <= pointer < end - 64 for start, end, *_ in mapped):
            for inner in range(0, 32, 8):
                if _word(pointer + inner) == frame:
                    return offset, inner
    raise Unreadable("the current frame was not found")


def _inner(frame: FrameType) -> int:
    """The interpreter's own frame behind a frame object: the third word of it."""
    return _word(id(frame) + 24)


def _in_code(code: CodeType, value: int, what: str) -> int:
    return _found(id(code), 256, lambda word: word == value, what)


_marked = compile("\n" * 54320 + "def marked(): pass\n", "marked", "exec").co_consts[0]


def _first_line() -> int:
    raw = _own(id(_marked), 256)
    for offset in range(16, 252, 4):
        if struct.unpack_from("<i", raw, offset)[0] == 54321:
            return offset
    raise Unreadable("the first line of a code object was not found")


def _line_table() -> int:
    """The getter gives the very object that the structure holds."""
    return _in_code(_marked, id(_marked.co_linetable), "the table of lines")


def _thread_state() -> int:
    ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
    return int(ctypes.pythonapi.PyThreadState_Get())


def _runtime() -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))


def _mappings(pid: int) -> list[tuple[int, int, int, str, str]]:
    """(start, end, offset in the file, device and inode, path) of what is mapped and readable."""
    found = []
    with open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            span, rights, offset, device, inode, *path = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in span.split("-"))
            if "r" in rights and not (path and path[0].startswith("[v")):
                found.append(
                    (
                        start,
                        end,
                        int(offset, 16),
                        f"{device} {inode}",
                        path[0].strip() if path else "",
                    )
                )
    return found


def _runtime_in(pid: int) -> int:
    """Where the other process has what we have at `_PyRuntime`: in the same file, as far from its
    beginning."""
    own = _runtime()
    mine = _mappings(os.getpid())
    holder = next((m for m in mine if m[0] <= own < m[1]), None)
    # The variable may lie in memory that continues the file without being of it: the file's last
    # mapping before it.
    files = [m for m in mine if m[4].startswith("/") and m[0] <= own]
    file = holder if holder and holder[4].startswith("/") else (files[-1] if files else None)
    if file is None:
        raise Unreadable("the interpreter's file was not found")
    base = min(m[0] for m in mine if m[3] == file[3])
    try:
        theirs = [m[0] for m in _mappings(pid) if m[3] == file[3]]
    except OSError as error:
        raise Unreadable(f"process {pid} cannot be looked at ({error.strerror})") from None
    if not theirs:
        raise Unreadable(f"process {pid} runs another Python than this one ({file[4]})")
    return min(theirs) + (own - base)
