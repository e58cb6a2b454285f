"""How this rank ends: an exception that nobody caught, sys.exit, os._exit, or the end of the
program."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import traceback
from types import TracebackType
from typing import Any

from paralab.observe import sites
from paralab.observe.rank import Rank

MOST_TEXT = 20_000  # characters of a traceback, the last ones: they tell what it was


def install(rank: Rank) -> None:
    earlier = sys.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        note_exception(rank, error, trace)
        earlier(kind, error.with_traceback(without_us(trace)), error.__traceback__)

    sys.excepthook = uncaught
    atexit.register(lambda: end(rank, "finished"))
    _observe_exits(rank)


def children_end_too(rank: Rank) -> None:
    """A process of multiprocessing ends without atexit; this is its own list of last things."""
    multiprocessing.util.Finalize(None, end, args=(rank, "finished"), exitpriority=-100)


def end(rank: Rank, how: str, **fields: Any) -> None:
    if not rank.on or rank.journal is None or rank.pid != os.getpid():
        return
    try:
        rank.emit("end", how=how, **{"site": None, **fields})
        rank.flush()
    except Exception as error:
        rank.switch_off(error)


def note_exception(rank: Rank, error: BaseException, trace: TracebackType | None) -> None:
    try:
        own = [frame for frame in traceback.extract_tb(trace) if sites.is_own(frame.filename)]
        stack = [
            [os.path.abspath(frame.filename), frame.lineno or 0, frame.name]
            for frame in reversed(own)
        ][: sites.DEPTH]
        text = "".join(traceback.format_exception(type(error), error, trace))[-MOST_TEXT:]
        rank.emit(
            "exception",
            type=type(error).__name__,
            message=str(error)[:4000],
            stack=stack,
            text=text,
            site=None,
        )
    except Exception as own_error:
        rank.switch_off(own_error)


def without_us(trace: TracebackType | None) -> TracebackType | None:
    """The traceback as it would be without our wrappers in it."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(sites.PACKAGE):
        trace = trace.tb_next
    if trace is not None:
        trace.tb_next = without_us(trace.tb_next)
    return trace


def _observe_exits(rank: Rank) -> None:
    leave, leave_at_once = sys.exit, os._exit

    def note_cause(status: Any) -> None:
        """`except Exception: …; sys.exit(1)`, also how ranks of torch.multiprocessing.spawn end,
        tells by the code alone."""
        error = sys.exc_info()[1]
        if status and error is not None and not isinstance(error, SystemExit):
            note_exception(rank, error, error.__traceback__)

    def exit_(status: Any = None, /) -> Any:
        note_cause(status)
        try:
            rank.emit(
                "exit",
                code=status if isinstance(status, int) else 0 if status is None else 1,
                call="sys.exit",
            )
        except Exception as error:
            rank.switch_off(error)
        leave(status)

    def _exit(status: int) -> Any:
        if rank.pid == os.getpid() and rank.journal is not None:
            note_cause(status)
            try:
                rank.emit("exit", code=status, call="os._exit")
                rank.flush()
            except Exception as error:
                rank.switch_off(error)
        leave_at_once(status)

    sys.exit, os._exit = exit_, _exit
