"""Signals that ask a command to stop: what they are called, who hears them, and how ranks learn of
it.

Only the launcher hears them. `scancel` signals every process of a job, `kill -PGID` every process
of a group. If a rank obeyed such a signal, it would be gone before the launcher could have all
ranks finish their step and save. So ranks, and the process that they are forked from, ignore these
signals, and the launcher talks to them through the pipe at their standard input.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any


def _known(*names: str) -> tuple[signal.Signals, ...]:
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


TYPED = _known("SIGINT", "SIGQUIT")  # by a person at the terminal
ENDS = (*TYPED, *_known("SIGTERM", "SIGHUP"))  # each of them ends a command in order
STOPS = (
    *ENDS,
    *_known("SIGUSR1"),
)  # with --checkpoint each of them saves first; Slurm sends SIGUSR1 before the time limit
QUESTION, STOP = b"?", b"!"  # what the launcher writes to a rank: where are you? stop at once


class StopSignal(KeyboardInterrupt):
    """A signal ends this command. Like Ctrl-C, which is one of them."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def number_of(error: KeyboardInterrupt) -> int:
    return error.number if isinstance(error, StopSignal) else signal.SIGINT


def name_of(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def exit_code_of(number: int) -> int:
    """As a shell counts: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, 131 for SIGQUIT."""
    return 128 + number


def raise_stop(number: int, frame: FrameType | None = None) -> None:
    raise StopSignal(number)


def hear(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Set handlers; return those from before. What somebody has ignored (`nohup`, a shell's `&`)
    stays ignored. Only the main thread can set handlers; elsewhere, as in a notebook's worker
    thread, signals do not arrive anyway."""
    before = {number: signal.getsignal(number) for number in handlers}
    heard = {
        number: handler
        for number, handler in before.items()
        if handler not in (signal.SIG_IGN, None)
    }
    try:
        for number in heard:
            signal.signal(number, handlers[number])
    except ValueError:
        return {}
    return heard


@contextmanager
def blocked() -> Iterator[None]:
    """A process that is started in this block begins with these signals blocked, until it can say
    itself that it ignores them: loading torch takes seconds."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """For a process that runs no code of the user."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def leave_to_the_launcher(on_sigterm: Callable[[], None] = lambda: None) -> None:
    """For a process that runs the user's code. SIGTERM is handled, not ignored: a program that this
    code starts would inherit that, and the user's own `terminate()` would do nothing."""
    ignore()
    signal.signal(signal.SIGTERM, lambda number, frame: on_sigterm())
    if hasattr(os, "register_at_fork"):
        signal.siginterrupt(
            signal.SIGTERM, False
        )  # compiled code that waits for a socket goes on waiting
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
