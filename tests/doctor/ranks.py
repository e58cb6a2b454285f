"""Corpus scripts under observation, fast: the ranks are forked from one warm process that has
imported torch (see warm.py)."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from paralab.doctor.events import Backward, Collective
from paralab.doctor.observing import observe

WARM = Path(__file__).parent / "warm.py"
ROOT = Path(__file__).parents[2]


class Ranks:
    """`observed(script)` runs a script on two ranks and gives what `observe` gives; `count=0`: as
    one process that no launcher has started. The server is started at the first one. Several
    threads may ask at a time."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.socket = str(Path(self.folder.name, "socket"))
        self.process = None
        self.lock = threading.Lock()

    def start(self):
        """Once; what follows is fast."""
        if self.process is not None:
            return
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, str(WARM), "serve", self.socket]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self.process.stdout.readline() == b"ready\n"

    def observed(
        self,
        script,
        *arguments,
        folder,
        stall_seconds=1.0,
        steps=None,
        deadline=30.0,
        count=2,
        **more,
    ):
        with self.lock:
            self.start()
        command = [
            "env",
            f"WARM_RANKS={count}",
            sys.executable,
            "-S",
            str(WARM),
            self.socket,
            str(script),
            *map(str, arguments),
        ]
        began = time.monotonic()
        result = observe(
            command,
            steps=steps,
            stall_seconds=stall_seconds,
            folder=folder,
            end_when_hung=True,
            **more,
        )
        assert time.monotonic() - began < deadline
        return result

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait(10)
            self.process.stdout.close()
        self.folder.cleanup()


@pytest.fixture(scope="session")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


def waited_in(rank):
    """The operation in which it hung: open still, or raised when the ranks were ended one after the
    other."""
    return max(
        (
            event
            for event in (*rank.story, *rank.doing)
            if isinstance(event, (Backward, Collective))
        ),
        key=lambda event: event.t,
    )
