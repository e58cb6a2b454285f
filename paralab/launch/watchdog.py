"""Detect hung ranks by their deadlines, and make all ranks dump their stacks."""

import itertools
import json
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paralab.launch.processes import Child
from paralab.launch.run_options import Deadlines
from paralab.machine.processes import state_of
from paralab.machine.signals import QUESTION
from paralab.record.status_board import Post, StatusBoard

ANSWER_SECONDS = 1.0


class LateRank(NamedTuple):
    rank: int
    phase: str
    step: int
    seconds: float
    deadline: float


@dataclass(frozen=True)
class Watchdog:
    """Watches the ranks in `numbers` on the status board."""

    board: StatusBoard
    numbers: list[int]
    deadlines: Deadlines
    answers: Path  # a temporary folder, to which ranks write their stack dumps
    dumps: Path  # in the run folder; the watchdog copies the dumps there

    @property
    def posts(self) -> list[Post]:
        return [self.board.read(number) for number in self.numbers]

    def find_late(self, codes: list[int | None]) -> list[LateRank]:
        """Return the running ranks (exit code None) that are past their deadline."""
        now = time.perf_counter()
        late = []
        for rank, post, code in zip(self.numbers, self.posts, codes, strict=True):
            limit = getattr(self.deadlines, post.phase, float("inf"))
            if code is None and not post.waiting and now - post.since > limit:
                late.append(LateRank(rank, post.phase, post.step, now - post.since, limit))
        return late

    def dump_stacks(self, ranks: list[Child]) -> None:
        """Ask each rank for its stacks. Also record its state, because a stopped rank cannot
        answer."""
        for number, rank in zip(self.numbers, ranks, strict=True):
            with suppress(OSError):  # the disk may be full
                self.dumps.mkdir(parents=True, exist_ok=True)
                state = json.dumps({"state": _state(rank), "pid": rank.pid})
                (self.dumps / f"rank{number}.state").write_text(state)
            with suppress(OSError):
                assert rank.stdin
                rank.stdin.write(QUESTION)
                rank.stdin.flush()
        able = [_state(rank) not in ("T", "ended") for rank in ranks]
        numbers = itertools.compress(self.numbers, able)
        answers = [self.answers / f"rank{number}.json" for number in numbers]
        until = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < until and not all(answer.exists() for answer in answers):
            time.sleep(0.05)

        # Send this signal last, because it kills a rank that has no handler yet.
        for rank in ranks:
            if rank.poll() is None:
                with suppress(OSError):
                    rank.send_signal(signal.SIGUSR2)
        time.sleep(0.1)
        for number, suffix in itertools.product(self.numbers, (".json", ".txt")):
            with suppress(OSError):  # a rank that is stopped or holds the GIL does not answer
                shutil.copy(self.answers / f"rank{number}{suffix}", self.dumps)


def _state(rank: Child) -> str | None:
    """Return the letter that `ps` shows: R running, S sleeping, T stopped, D waiting for a disk."""
    return "ended" if rank.poll() is not None else state_of(rank.pid)
