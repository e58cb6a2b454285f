"""Let micro-batches take turns at the stages: micro-batch j enters a stage when j-1 has left it.
This uses only threading, not torch.

forward, 2 stages, 3 micro-batches            backward
    stage 0   0 1 2                               stage 1   0 1 2
    stage 1     0 1 2                             stage 0     0 1 2
"""

from __future__ import annotations

import threading


class Aborted(Exception):
    """Another micro-batch failed, so this one stops waiting."""


class StageOrder:
    """The order of micro-batches at each stage, for one forward or backward sweep."""

    def __init__(self, stages: int) -> None:
        self._next = [0] * stages
        self._changed = threading.Condition()
        self._aborted = False

    def enter(self, stage: int, micro: int) -> None:
        """Wait until all earlier micro-batches have left this stage."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._next[stage] == micro)
            if self._aborted:
                raise Aborted

    def leave(self, stage: int, micro: int) -> None:
        with self._changed:
            self._next[stage] = micro + 1
            self._changed.notify_all()

    def abort(self) -> None:
        """Wake all waiting micro-batches after a failure."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
