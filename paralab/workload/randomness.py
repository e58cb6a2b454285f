"""Seed user code, so that all ranks draw the same random numbers and have the same data."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from paralab.workload.hooks import patched


def seed_everything(seed: int, gpus: bool = True) -> None:
    """Seed torch, random, and (if it is imported) numpy, for the rest of this process."""
    # Without a GPU, `torch.manual_seed` takes 100 times as long: it notes the stack for each kind.
    with_gpus = gpus and torch.accelerator.is_available()
    (torch.manual_seed if with_gpus else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


@contextmanager
def seeded(seed: int, position: int = 0) -> Iterator[None]:
    """Seed all common generators in this context, and restore them afterward."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        seed_everything((seed * 1_000_000_007 + position) % 2**32, gpus=False)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Turn off dropout in this process: modules, functions, attention, and recurrent layers.

    Otherwise, two runs would drop different values, which could hide a real mistake.
    """
    attention = nn.functional.scaled_dot_product_attention

    def attend(*args: Any, **named: Any) -> Any:
        four, dropout_p, more = args[:4], args[4:5], args[5:]
        named.pop("dropout_p", None)  # 0 is the default
        return attention(*four, *(0.0 for _ in dropout_p), *more, **named)

    names = ["dropout", "dropout1d", "dropout2d", "dropout3d"]
    names += ["alpha_dropout", "feature_alpha_dropout"]
    functions: dict[str, Any] = dict.fromkeys(names, lambda input, *_, **__: input)
    functions["scaled_dot_product_attention"] = attend
    with ExitStack() as stack:
        stack.enter_context(patched(nn.functional, **functions))
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                stack.enter_context(patched(module, dropout=0.0))
        yield
