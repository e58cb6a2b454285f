"""Signals that ask a command to stop: their names, who handles them, and how they reach ranks.

Only the launcher handles them. `scancel` signals every process in a job, and `kill -PGID` signals
every process in a group. If a rank obeyed, it would exit before the launcher could let all ranks
finish their step and save. So ranks, and the process that they are forked from, ignore these
signals. The launcher sends them orders through the pipe to their standard input.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paralab.errors import Interrupted


def _existing(*names: str) -> tuple[signal.Signals, ...]:
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


TYPED = _existing("SIGINT", "SIGQUIT")  # a key press in the terminal sends these
ENDS = (*TYPED, *_existing("SIGTERM", "SIGHUP"))  # each of these stops a command gracefully
# With --checkpoint, the run saves before it stops. Slurm sends SIGUSR1 before the time limit.
STOPS = (*ENDS, *_existing("SIGUSR1"))
QUESTION, STOP = b"?", b"!"  # from the launcher to a rank: "where are you?" and "stop now"


class StopSignal(KeyboardInterrupt):
    """Raised when a signal stops this command, like KeyboardInterrupt for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def number_of(error: KeyboardInterrupt) -> int:
    return error.number if isinstance(error, StopSignal) else signal.SIGINT


def name_of(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def describe_exit(code: int) -> str:
    """Describe a process's exit code: `exited with code 3`, or `was killed by SIGSEGV`."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def exit_code_of(number: int) -> int:
    """Return the exit code by shell convention: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number


def interrupted(number: int, problem: str, fix: str | None = None) -> Interrupted:
    """Return the error for a command that a signal stopped: `Stopped by Ctrl-C` and the problem."""
    return Interrupted(
        f"Stopped by {name_of(number)}{problem}", fix, exit_code=exit_code_of(number)
    )


def raise_stop(number: int, frame: FrameType | None = None) -> None:
    raise StopSignal(number)


def set_handlers(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Set signal handlers and return the previous handlers. A signal that is ignored (because of
    `nohup` or a shell's `&`) stays ignored. Outside the main thread, such as in a notebook's worker
    thread, do nothing, because signals do not arrive there."""
    before = {number: signal.getsignal(number) for number in handlers}
    ignored = (signal.SIG_IGN, None)
    heard = {number: each for number, each in before.items() if each not in ignored}
    try:
        for number in heard:
            signal.signal(number, handlers[number])
    except ValueError:
        return {}
    return heard


@contextmanager
def blocked() -> Iterator[None]:
    """Block stop signals in processes that start in this context. Loading torch takes seconds.
    After that, each process ignores the signals itself."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore stop signals in a process that does not run user code."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def leave_to_the_launcher(on_sigterm: Callable[[], None] = lambda: None) -> None:
    """Ignore stop signals in a process that runs user code. SIGTERM gets a handler instead. If it
    were ignored, child processes would ignore it too, and a `terminate()` in user code would have
    no effect."""
    ignore()
    signal.signal(signal.SIGTERM, lambda number, frame: on_sigterm())
    if hasattr(os, "register_at_fork"):
        signal.siginterrupt(signal.SIGTERM, False)  # compiled code keeps waiting for its socket
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
