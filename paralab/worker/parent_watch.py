"""A child process exits with the process that started it, which holds the other end of our standard
input."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

ORPHANED = 130


def end_with_the_parent(orders: Mapping[bytes, Callable[[], None]] | None = None) -> None:
    """Exit as soon as the pipe at standard input is closed, for whatever reason. Each byte in it is
    an order; a side thread carries it out."""

    def listen() -> None:
        while order := os.read(0, 1):
            with suppress(Exception):  # whatever fails, this thread must continue to listen
                (orders or {})[order]()
        os._exit(ORPHANED)

    threading.Thread(target=listen, name="paralab-lifeline", daemon=True).start()
