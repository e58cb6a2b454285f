"""Other processes on this machine, through psutil: their state, environment, and children.

Only the launching and the reading half import this module. A rank needs only torch and numpy.
"""

from __future__ import annotations

import psutil

# psutil's word -> the letter that `ps` prints, which run folders store.
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


def state_of(pid: int) -> str | None:
    """Return R running, S sleeping, T stopped, D waiting for a disk, …; None if the process does
    not exist or the system does not report its state."""
    try:
        return LETTERS.get(psutil.Process(pid).status())
    except psutil.Error:
        return None


def parent_of(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def name_of(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def environment_of(pid: int) -> dict[str, str]:
    """Return a process's initial environment; empty if it is gone or belongs to another user."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return {}


def cpu_seconds_of(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def descendants_of(pid: int) -> list[int]:
    """Return children, grandchildren, …, with parents before their children."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def is_python(pid: int) -> bool:
    try:
        return "python" in psutil.Process(pid).exe().rpartition("/")[2].lower()
    except psutil.Error:
        return False


def has_loaded(pid: int, library: str) -> bool:
    """Return whether a process has mapped a library; False if the system cannot tell (macOS)."""
    try:
        return any(library in each.path for each in psutil.Process(pid).memory_maps())
    except (psutil.Error, AttributeError):
        return False
