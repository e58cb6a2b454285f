"""Notices ranks that hang, from outside: a deadline for each phase, and every rank's word on where
it is, before they are ended."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paralab.errors import UsageError
from paralab.launch.processes import Child
from paralab.machine.processes import state_of
from paralab.machine.signals import QUESTION
from paralab.record.status_board import Post, StatusBoard

ANSWER_SECONDS = 1.0


class Deadlines(NamedTuple):
    """The longest that a phase may take: from the start to the first step, one step, what of a save
    the training waits for."""

    start: float = 600.0
    step: float = 600.0
    save: float = 600.0

    def check(self) -> None:
        for phase, seconds in self._asdict().items():
            if not seconds > 0:
                raise UsageError(
                    f"--{phase}-deadline {seconds:g} is not a positive number of seconds.",
                    fix=f"--{phase}-deadline 60",
                )


class Late(NamedTuple):
    rank: int
    phase: str
    step: int
    seconds: float
    deadline: float


@dataclass(frozen=True)
class Watchdog:
    board: StatusBoard
    numbers: list[int]  # the ranks that were started here
    deadlines: Deadlines
    answers: Path  # where the ranks write
    testimonies: Path  # where it is kept

    @property
    def posts(self) -> list[Post]:
        return [self.board.read(number) for number in self.numbers]

    def late(self, codes: list[int | None]) -> list[Late]:
        """The ranks, of those that run, that are over their deadline."""
        now = time.perf_counter()
        found = []
        for rank, post, code in zip(self.numbers, self.posts, codes, strict=True):
            limit = getattr(self.deadlines, post.phase, float("inf"))
            if code is None and not post.waiting and now - post.since > limit:
                found.append(Late(rank, post.phase, post.step, now - post.since, limit))
        return found

    def question(self, ranks: list[Child]) -> None:
        """Let every rank say where it is, and write down what the system says of it: a stopped
        process does not answer."""
        for number, rank in zip(self.numbers, ranks, strict=True):
            with suppress(OSError):  # the disk may be full
                self.testimonies.mkdir(parents=True, exist_ok=True)
                (self.testimonies / f"rank{number}.state").write_text(
                    json.dumps({"state": _state(rank), "pid": rank.pid})
                )
            with suppress(OSError):
                assert rank.stdin
                rank.stdin.write(QUESTION)
                rank.stdin.flush()
        until = time.monotonic() + ANSWER_SECONDS
        able = [
            number
            for number, rank in zip(self.numbers, ranks, strict=True)
            if _state(rank) not in ("T", "ended")
        ]
        answers = [self.answers / f"rank{number}.json" for number in able]
        while time.monotonic() < until and not all(answer.exists() for answer in answers):
            time.sleep(0.05)
        for (
            rank
        ) in ranks:  # last: a rank that has not come so far as to handle this signal is ended by it
            if rank.poll() is None:
                with suppress(OSError):
                    rank.send_signal(signal.SIGUSR2)
        time.sleep(0.1)
        for number, suffix in itertools.product(self.numbers, (".json", ".txt")):
            answer = self.answers / f"rank{number}{suffix}"
            if answer.exists():
                with suppress(OSError):
                    shutil.copy(answer, self.testimonies)


def _state(rank: Child) -> str | None:
    """The letter that `ps` shows: R running, S sleeping, T stopped, D waiting for a disk."""
    return "ended" if rank.poll() is not None else state_of(rank.pid)
