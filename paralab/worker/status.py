"""Report a rank's progress to the launcher and carry out the launcher's orders."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable
from pathlib import Path

from paralab.machine.signals import QUESTION, STOP
from paralab.record.stack_dump import dump_stacks
from paralab.record.status_board import StatusBoard
from paralab.worker.parent_watch import end_with_the_parent


class RankStatus:
    """This rank's entry on the status board. Without a board, it never reports or stops."""

    def __init__(self, board: StatusBoard | None = None, rank: int = 0) -> None:
        self.board, self.rank = board, rank

    def enter(self, phase: str, step: int = -1) -> None:
        if self.board:
            self.board.post(self.rank, phase, step)

    def stops_before(self, step: int) -> bool:
        return self.board is not None and self.board.stops_before(self.rank, step)


def obey_the_launcher(dump: Path, stop: Callable[[], None]) -> None:
    """Start a side thread that carries out the launcher's orders: write all thread stacks and the
    last collectives to `dump`.json, or call `stop`.

    This thread cannot run while another thread holds the GIL. So on SIGUSR2, Python's fault
    handler, which does not need the GIL, writes the stacks to `dump`.txt.
    """
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, dump.with_suffix(".txt").open("w"), all_threads=True)
    end_with_the_parent({QUESTION: lambda: dump_stacks(dump), STOP: stop})
