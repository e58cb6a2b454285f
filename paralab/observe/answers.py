"""A thread that reports this rank's stack and last collectives when the file `ask` appears in the
ranks' folder."""

import os
import threading
import time
from contextlib import suppress

from paralab.observe.rank import Rank
from paralab.record.stack_dump import dump_stacks

QUERY_SECONDS = 0.25


def answer_when_asked(rank: Rank) -> None:
    args = (rank, rank.path, os.getpid())
    threading.Thread(target=_answer, args=args, name="paralab-answers", daemon=True).start()


def _answer(rank: Rank, path: object, pid: int) -> None:
    answered = 0.0
    ask = rank.folder / "ask"
    while rank.path is path and rank.path is not None and os.getpid() == pid:
        with suppress(Exception):  # one failed report does not prevent the next
            asked = os.stat(ask).st_mtime if ask.exists() else 0.0
            if asked > answered:
                dump_stacks(rank.path.with_suffix(".testimony"))
                answered = asked
        time.sleep(QUERY_SECONDS)
