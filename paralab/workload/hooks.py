"""Context managers that watch or replace what a forward calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes in this block, and restore them afterward."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def watched(
    model: nn.Module,
    enter: Callable[[str, Any], Any] = lambda name, arguments: None,
    leave: Callable[[str, Any], None] = lambda name, output: None,
) -> Iterator[None]:
    """Call `enter`, which may replace (args, kwargs), before each submodule, and `leave` after."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                before = module.register_forward_pre_hook(
                    lambda _, *arguments, name=name: enter(name, arguments), with_kwargs=True
                )
                after = module.register_forward_hook(
                    lambda _, args, output, name=name: leave(name, output)
                )
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        yield
