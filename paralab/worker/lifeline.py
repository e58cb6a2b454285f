"""A child process ends with the process that started it: that one holds the other end of our standard input."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

ORPHANED = 130


def end_with_the_parent(when_asked: Callable[[], None] = lambda: None) -> None:
    """End this process at once when the pipe at standard input is closed, however its other end came to be closed. A byte in it is
    a question: `when_asked` is called, in a side thread."""

    def listen() -> None:
        while os.read(0, 1):
            with suppress(Exception):  # whatever goes wrong with the answer, this thread must go on listening
                when_asked()
        os._exit(ORPHANED)

    threading.Thread(target=listen, name="paralab-lifeline", daemon=True).start()
