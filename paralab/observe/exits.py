"""How this rank exits: an uncaught exception, sys.exit, os._exit, or the end of the program."""

import atexit
import builtins
import multiprocessing.util
import os
import sys
import traceback
from types import TracebackType
from typing import Any

from paralab.observe import sites
from paralab.observe.rank import Rank

MOST_TEXT = 20_000  # how many characters at the end of a traceback to keep


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
    """Register a finalizer: multiprocessing's children run finalizers but not atexit handlers."""
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
        innermost = own[: -sites.DEPTH - 1 : -1]
        stack = [[os.path.abspath(f.filename), f.lineno or 0, f.name] for f in innermost]
        text = "".join(traceback.format_exception(type(error), error, trace))[-MOST_TEXT:]
        kind, message = type(error).__name__, str(error)[:4000]
        rank.emit("exception", type=kind, message=message, stack=stack, text=text, site=None)
    except Exception as own_error:
        rank.switch_off(own_error)


def without_us(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(sites.PACKAGE):
        trace = trace.tb_next
    if trace is not None:
        trace.tb_next = without_us(trace.tb_next)
    return trace


def _observe_exits(rank: Rank) -> None:
    leave, leave_at_once = sys.exit, os._exit
    # The type of `quit` and `exit`, which python -S lacks.
    quitter: Any = type(getattr(builtins, "quit", None))

    def note(status: Any, call: str) -> None:
        """Record an exit, and the exception behind `except Exception: …; sys.exit(1)`. Ranks of
        torch.multiprocessing.spawn also exit like this."""
        error = sys.exc_info()[1]
        if status and error is not None and not isinstance(error, SystemExit):
            note_exception(rank, error, error.__traceback__)
        try:
            code = status if isinstance(status, int) else int(status is not None)
            rank.emit("exit", code=code, call=call)
        except Exception as own_error:
            rank.switch_off(own_error)

    def exit_(status: Any = None, /) -> Any:
        note(status, "sys.exit")
        leave(status)

    def _exit(status: int) -> Any:
        if rank.pid == os.getpid() and rank.journal is not None:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if status == 0 and caller.startswith("multiprocessing."):
                end(rank, "finished")  # how every forked process ends
            else:
                note(status, "os._exit")
            rank.flush()
        leave_at_once(status)

    def quit_(quitter: Any, code: Any = None) -> Any:
        note(code, quitter.name)
        call(quitter, code)

    sys.exit, os._exit = exit_, _exit
    if quitter.__name__ == "Quitter":  # a shell such as IPython may have its own
        call, quitter.__call__ = quitter.__call__, quit_
