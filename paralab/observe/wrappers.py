"""Wrap a torch function so that the caller does not notice, even if our code fails.

`describe` gets the arguments before the call and returns the fields of the event, or None for no
event. `conclude` gets the result and returns more fields. Neither may change anything. In light
steps, `light` replaces both. Inside torch.compile, only the original runs.
"""

import functools
import inspect
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from paralab.observe import sites
from paralab.observe.light import Light
from paralab.observe.rank import MINOR, Fields, Rank

Describe = Callable[..., Fields | None]
Conclude = Callable[..., Fields]


def wrap(
    rank: Rank,
    owner: Any,
    name: str,
    event: str,
    describe: Describe,
    conclude: Conclude | None = None,
    *also: Any,
    light: Light | None = None,
) -> None:
    """Replace owner.name, and the same function in `also`. Skip names that this torch lacks."""
    original = inspect.getattr_static(owner, name, None)
    if not callable(original) or hasattr(original, "_paralab"):
        return
    wrapper = observed(rank, original, event, describe, conclude, light)
    setattr(owner, name, wrapper)
    for other in also:
        if getattr(other, name, None) is original:
            setattr(other, name, wrapper)


def observed(
    rank: Rank,
    original: Callable[..., Any],
    event: str,
    describe: Describe,
    conclude: Conclude | None = None,
    light: Light | None = None,
) -> Callable[..., Any]:
    compiling, clock = torch.compiler.is_compiling, time.perf_counter_ns
    minor = event in MINOR
    full = _Full(rank, event, describe, conclude)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling() or not rank.on or (minor and not rank.watched):
            return original(*args, **kwargs)
        began = clock()
        how = full if rank.watched or light is None else light
        operation: Any = None
        try:
            operation = how.begin(args, kwargs)
        except Exception as error:
            rank.switch_off(error)
        rank.budget.spent += clock() - began
        if operation is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            _report_failure(rank, how, operation, error)
            raise
        began = clock()
        try:
            how.end(operation, result, args, kwargs)
        except Exception as error:
            rank.switch_off(error)
        rank.budget.spent += clock() - began
        return result

    wrapper._paralab = True  # type: ignore[attr-defined]
    return wrapper


class _Full:
    """Records the calls to one function. In light steps, `light` replaces it if the function has
    one."""

    def __init__(
        self, rank: Rank, event: str, describe: Describe, conclude: Conclude | None
    ) -> None:
        self.rank, self.event, self.describe, self.conclude = rank, event, describe, conclude

    def begin(self, args: tuple[Any, ...], kwargs: Fields) -> Fields | None:
        fields = self.describe(*args, **kwargs)
        return None if fields is None else self.rank.open(self.event, fields)

    def end(self, operation: Fields, result: Any, args: tuple[Any, ...], kwargs: Fields) -> None:
        more = self.conclude(result, *args, **kwargs) if self.conclude else {}
        self.rank.close(operation, **more)

    def fail(self, operation: Fields, error: str) -> None:
        self.rank.close(operation, error=error)


def _report_failure(rank: Rank, how: Any, operation: Any, error: BaseException) -> None:
    try:
        if not isinstance(error, StopIteration):
            how.fail(operation, f"{type(error).__name__}: {error}"[:2000])
    except Exception as own:
        rank.switch_off(own)


def show_warnings_of_callers() -> None:
    """Make torch's warnings name the real caller, not our wrapper."""
    show = warnings.showwarning

    def showwarning(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        frame: FrameType | None = sys._getframe(1) if filename.startswith(sites.PACKAGE) else None
        while frame is not None and frame.f_code.co_filename != filename:
            frame = frame.f_back
        while frame is not None and frame.f_code.co_filename.startswith(sites.PACKAGE):
            frame = frame.f_back
        if frame is not None:
            filename, lineno, line = frame.f_code.co_filename, frame.f_lineno, None
        show(message, category, filename, lineno, file, line)

    warnings.showwarning = showwarning


def forget_with(thing: Any, known: dict[int, Any], *ids: int) -> None:
    """Remove these ids from `known` when `thing` is freed, because Python may reuse them. This does
    not keep `thing` alive."""

    def forget() -> None:
        for one in ids:
            known.pop(one, None)

    weakref.finalize(thing, forget).atexit = False


def argument(
    args: tuple[Any, ...], kwargs: Fields, place: int, name: str, default: Any = None
) -> Any:
    """Return an argument that was passed by position or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def is_inside(rank: Rank, *events: str) -> bool:
    """Return whether an operation of this kind is open. Calls inside it do not get events."""
    return any(operation["event"] in events for operation in rank.doing)
