"""Graceful stop: the first signal asks all ranks to finish their step and save, and the second
signal stops them immediately."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from paralab.machine.signals import STOPS, TYPED, StopSignal, hear, name_of

REPEAT_SECONDS = 5.0  # ignore repeats within this time: `timeout` may send a signal twice


class StopRequest:
    """The signal that asked the run to stop, if any."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self.announced = False
        self._say = say

    def __bool__(self) -> bool:
        return self.signal is not None

    def announce(self) -> None:
        """Tell the user once, outside the signal handler, which may interrupt a print."""
        if self.signal is not None and not self.announced:
            self.announced = True
            again = " again" if self.signal == signal.SIGINT else ""
            self._say(
                f"{name_of(self.signal)}: stopping after this step and saving. "
                f"Press Ctrl-C{again} to stop immediately."
            )


@contextmanager
def stop_in_order(
    enabled: bool, say: Callable[[str], None] = lambda line: None, together_seconds: float = 0.0
) -> Iterator[StopRequest]:
    """Record the first stop signal instead of stopping immediately.

    With --checkpoint, the run saves and stops on the first Ctrl-C, SIGTERM (from a cluster or
    `kill`), SIGHUP (a closed ssh session), SIGQUIT, or SIGUSR1 (Slurm's warning before the time
    limit). After that, Ctrl-C or a second SIGTERM stops it immediately. Signals within
    `together_seconds` count as one, because Ctrl-C reaches a launched rank twice: directly, and
    forwarded by the launcher.
    """
    request = StopRequest(say)
    first = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not request:
            request.signal, first = number, now
            return
        again = number == request.signal == signal.SIGTERM and now - first > REPEAT_SECONDS
        if (number in TYPED or again) and now - first > together_seconds:
            raise StopSignal(number)

    before = hear(dict.fromkeys(STOPS, handle)) if enabled else {}
    try:
        yield request
    finally:
        hear(before)
