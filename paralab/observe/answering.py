"""A side thread that answers a question from outside: where is this rank, and what were its last
collectives?

The question is a file, `ask`, in the observation's folder; asking again means touching it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from paralab.observe.rank import Rank
from paralab.record.stack_dump import dump_stacks

LOOK_SECONDS = 0.25


def answer_when_asked(rank: Rank) -> None:
    threading.Thread(
        target=_answer, args=(rank, rank.path, os.getpid()), name="paralab-answers", daemon=True
    ).start()


def _answer(rank: Rank, path: object, pid: int) -> None:
    answered = 0.0
    ask = rank.folder / "ask"
    while rank.path is path and rank.path is not None and os.getpid() == pid:
        with suppress(
            Exception
        ):  # whatever goes wrong with one answer, the next question is to be heard
            asked = os.stat(ask).st_mtime if ask.exists() else 0.0
            if asked > answered:
                dump_stacks(rank.path.with_suffix(".testimony"))
                answered = asked
        time.sleep(LOOK_SECONDS)
