"""Follow orders from the parent process, which writes to this process's stdin."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from paralab.machine.signals import QUESTION, STOP
from paralab.record.stack_dump import dump_stacks

ORPHANED = 130


def end_with_the_parent(orders: Mapping[bytes, Callable[[], None]] | None = None) -> None:
    """Exit when stdin closes. Until then, execute each byte from stdin as an order, in a thread."""

    def listen() -> None:
        while order := os.read(0, 1):
            with suppress(Exception):  # keep listening after any failure
                (orders or {})[order]()
        os._exit(ORPHANED)

    threading.Thread(target=listen, name="paralab-lifeline", daemon=True).start()
    # User code that asks a question (input, breakpoint) fails instead of waiting for an order.
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115


def obey_the_launcher(dump: Path, stop: Callable[[], None]) -> None:
    """Execute the launcher's orders: write all thread stacks and the last collectives to
    `dump`.json, or call `stop`.

    The background thread cannot run while another thread holds the GIL. Python's fault handler does
    not need the GIL, so let it write the stacks to `dump`.txt on SIGUSR2.
    """
    faulthandler.register(signal.SIGUSR2, dump.with_suffix(".txt").open("w"), all_threads=True)
    end_with_the_parent({QUESTION: lambda: dump_stacks(dump), STOP: stop})
