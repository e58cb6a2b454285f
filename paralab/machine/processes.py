"""Other processes on this machine: their state, environment, and children, from psutil.

Ranks do not import this module, because they need only torch and numpy.
"""

from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

# psutil's status -> the letter that `ps` prints. Run folders store the letter.
LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DEAD: "X",
    psutil.STATUS_IDLE: "I",
}


def _read(pid: int, read: Callable[[psutil.Process], T], otherwise: T) -> T:
    """Read a property of a process. Return `otherwise` if the process has exited or belongs to
    another user, or if the system does not report the property."""
    try:
        return read(psutil.Process(pid))
    except (psutil.Error, OSError, AttributeError):
        return otherwise


def state_of(pid: int) -> str | None:
    """Return the letter that `ps` shows (R, S, T, D, …), or None if unknown."""
    return _read(pid, lambda process: LETTERS.get(process.status()), None)


def parent_of(pid: int) -> int | None:
    return _read(pid, lambda process: process.ppid(), None)


def name_of(pid: int) -> str:
    return _read(pid, lambda process: process.name(), "")


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process started with."""
    return _read(pid, lambda process: process.environ(), {})


def cpu_seconds_of(pid: int) -> float:
    return _read(pid, lambda process: float(sum(process.cpu_times()[:2])), 0.0)  # user + system


def descendants_of(pid: int) -> list[int]:
    """Return a process's children, grandchildren, and so on, with parents before their children."""
    return _read(pid, lambda process: [each.pid for each in process.children(recursive=True)], [])


def is_python(pid: int) -> bool:
    return _read(pid, lambda process: "python" in process.exe().rpartition("/")[2].lower(), False)


def has_loaded(pid: int, library: str) -> bool:
    """Return whether a process has loaded a library, or False if the system cannot tell (macOS)."""
    return _read(
        pid, lambda process: any(library in each.path for each in process.memory_maps()), False
    )
