"""What this rank tells the launcher while it runs, and where the launcher can make it stop or speak."""

from __future__ import annotations

import faulthandler
import json
import linecache
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from paralab.record.board import Board
from paralab.worker.lifeline import end_with_the_parent


class Pulse:
    """This rank's place on the notice board; without a board (no launcher of ours) it says nothing."""

    def __init__(self, board: Board | None = None, rank: int = 0) -> None:
        self.board, self.rank = board, rank

    def enter(self, phase: str, step: int = -1) -> None:
        if self.board:
            self.board.post(self.rank, phase, step)

    def stops_before(self, step: int) -> bool:
        return self.board is not None and self.board.stops_before(self.rank, step)


def speak_when_asked(testimony: Path) -> None:
    """When the launcher asks, a side thread writes where every thread is and the last collectives to `testimony`.json.

    A thread cannot speak while another one holds the interpreter, so SIGUSR2 makes Python's fault handler, which does not need it,
    write the stacks to `testimony`.txt.
    """
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, testimony.with_suffix(".txt").open("w"), all_threads=True)
    end_with_the_parent(lambda: testify(testimony))


def testify(testimony: Path) -> None:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        names.get(ident, str(ident)): [
            {"file": f.filename, "line": f.lineno, "function": f.name, "code": linecache.getline(f.filename, f.lineno or 0).strip()}
            for f in traceback.extract_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
    }
    part = testimony.with_suffix(".part")
    part.write_text(json.dumps({"stacks": stacks, "collectives": _collectives()}))
    part.rename(testimony.with_suffix(".json"))


def _collectives() -> list[dict[str, Any]]:
    """The flight recorder's last entries, which gloo fills as well. A private function: what it gives may change or be missing."""
    try:
        dump: Any = torch._C._distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
        entries = json.loads(dump(includeCollectives=True, onlyActive=False))["entries"]
    except Exception:
        return []
    kept = ("process_group", "collective_seq_id", "is_p2p", "p2p_seq_id", "profiling_name", "retired", "state", "input_sizes")
    return [{name: entry.get(name) for name in kept} for entry in entries[-50:]]
