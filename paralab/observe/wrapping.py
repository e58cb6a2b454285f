"""Putting a function of ours around one of torch, so that the caller cannot tell, whatever ours does.

`describe` looks at the arguments before the call and gives the fields of the event, or None: nothing to write down. `conclude`
looks at the result and gives more fields. Neither may change anything. Inside torch.compile the original runs alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from paralab.observe.rank import MINOR, Rank

Fields = dict[str, Any]
Describe = Callable[..., Fields | None]


def wrap(
    rank: Rank, owner: Any, name: str, event: str, describe: Describe, conclude: Callable[..., Fields] | None = None, *also: Any
) -> None:
    """Replace owner.name (and the same function under the same name in `also`). A name that this torch lacks is left out."""
    original = inspect.getattr_static(owner, name, None)
    if not callable(original) or hasattr(original, "_paralab"):
        return
    wrapper = observed(rank, original, event, describe, conclude)
    setattr(owner, name, wrapper)
    for other in also:
        if getattr(other, name, None) is original:
            setattr(other, name, wrapper)


def observed(
    rank: Rank, original: Callable[..., Any], event: str, describe: Describe, conclude: Callable[..., Fields] | None = None
) -> Callable[..., Any]:
    compiling = torch.compiler.is_compiling
    minor = event in MINOR

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling() or not rank.on or (minor and not rank.watched):
            return original(*args, **kwargs)
        operation = None
        try:
            fields = describe(*args, **kwargs)
            if fields is not None:
                operation = rank.open(event, fields)
        except Exception as error:
            rank.switch_off(error)
        if operation is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            _failed(rank, operation, error)
            raise
        try:
            rank.close(operation, **(conclude(result, *args, **kwargs) if conclude else {}))
        except Exception as error:
            rank.switch_off(error)
        return result

    wrapper._paralab = True  # type: ignore[attr-defined]
    return wrapper


def _failed(rank: Rank, operation: Fields, error: BaseException) -> None:
    try:
        if not isinstance(error, StopIteration):
            rank.close(operation, error=f"{type(error).__name__}: {error}"[:2000])
    except Exception as own:
        rank.switch_off(own)


def argument(args: tuple[Any, ...], kwargs: Fields, place: int, name: str, default: Any = None) -> Any:
    """An argument given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def is_inside(rank: Rank, *events: str) -> bool:
    """An operation of one of these kinds is open: what it calls itself is not written down again."""
    return any(operation["event"] in events for operation in rank.doing)
