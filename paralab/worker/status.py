"""What this rank tells the launcher while it runs, and where the launcher can make it stop or
speak."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable
from pathlib import Path

from paralab.machine.signals import QUESTION, STOP
from paralab.record.stack_dump import testify
from paralab.record.status_board import StatusBoard
from paralab.worker.parent_watch import end_with_the_parent


class Pulse:
    """This rank's place on the notice board; without a board (no launcher of ours) it says
    nothing."""

    def __init__(self, board: StatusBoard | None = None, rank: int = 0) -> None:
        self.board, self.rank = board, rank

    def enter(self, phase: str, step: int = -1) -> None:
        if self.board:
            self.board.post(self.rank, phase, step)

    def stops_before(self, step: int) -> bool:
        return self.board is not None and self.board.stops_before(self.rank, step)


def obey_the_launcher(testimony: Path, stop: Callable[[], None]) -> None:
    """When the launcher asks, a side thread writes where every thread is and the last collectives
    to `testimony`.json, or stops.

    A thread cannot speak while another one holds the interpreter, so SIGUSR2 makes Python's fault
    handler, which does not need it, write the stacks to `testimony`.txt.
    """
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(
            signal.SIGUSR2, testimony.with_suffix(".txt").open("w"), all_threads=True
        )
    end_with_the_parent({QUESTION: lambda: testify(testimony), STOP: stop})
