"""A child process ends with the process that started it: that one holds the other end of our
standard input."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

ORPHANED = 130


def end_with_the_parent(orders: Mapping[bytes, Callable[[], None]] | None = None) -> None:
    """End this process at once when the pipe at standard input is closed, however its other end
    came to be closed. A byte in it is an order, which is carried out in a side thread."""

    def listen() -> None:
        while order := os.read(0, 1):
            with suppress(Exception):  # whatever goes wrong, this thread must go on listening
                (orders or {})[order]()
        os._exit(ORPHANED)

    threading.Thread(target=listen, name="paralab-lifeline", daemon=True).start()
