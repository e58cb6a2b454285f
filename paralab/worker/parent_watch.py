"""Make a child process exit with its parent. The parent holds the other end of the child's standard
input."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

ORPHANED = 130


def end_with_the_parent(orders: Mapping[bytes, Callable[[], None]] | None = None) -> None:
    """Exit as soon as the standard input pipe is closed, for any reason. Each byte in it is an
    order, which a side thread carries out."""

    def listen() -> None:
        while order := os.read(0, 1):
            with suppress(Exception):  # this thread must keep listening after any failure
                (orders or {})[order]()
        os._exit(ORPHANED)

    threading.Thread(target=listen, name="paralab-lifeline", daemon=True).start()
