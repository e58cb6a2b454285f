"""Context managers that watch or replace what a forward pass calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Intercepting(TorchDispatchMode):
    """Run `call(func, args, kwargs)` instead of each operator, in this context and thread."""

    def __init__(self, call: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})


def draws(func: Any) -> bool:
    """Return whether an operator draws random numbers. torch tags these operators."""
    return torch.Tag.nondeterministic_seeded in func.tags


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Set these attributes in this context, and restore them afterward."""
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
