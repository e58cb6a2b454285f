"""Seed user code: it must draw the same random numbers in all processes, or ranks would not share
their data."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def seed_everything(seed: int, gpus: bool = True) -> None:
    """Seed torch, random, and numpy (if it is imported), for the rest of this process."""
    (torch.manual_seed if gpus else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


@contextmanager
def seeded(seed: int, position: int = 0) -> Iterator[None]:
    """Seed all common generators from (seed, position) in this block, and restore them after it."""
    value = (seed * 1_000_000_007 + position) % 2**32
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(value)  # torch.manual_seed would also seed GPUs
        random.seed(value)
        if numpy:
            numpy.random.seed(value)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Turn off dropout in this process: modules, functions, attention, and recurrent layers.

    Two runs whose dropout draws different numbers cannot be compared, and that difference could
    hide a real mistake.
    """
    names = ["dropout", "dropout1d", "dropout2d", "dropout3d"]
    names += ["alpha_dropout", "feature_alpha_dropout"]
    original = {name: getattr(nn.functional, name) for name in names}
    attention = nn.functional.scaled_dot_product_attention
    recurrent = {m: m.dropout for m in model.modules() if isinstance(m, nn.RNNBase)}

    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *more: Any,
        **named: Any,
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *more, **named)

    try:
        for name in names:
            setattr(nn.functional, name, lambda input, *_, **__: input)
        nn.functional.scaled_dot_product_attention = attend
        for module in recurrent:
            module.dropout = 0.0
        yield
    finally:
        for name, function in original.items():
            setattr(nn.functional, name, function)
        nn.functional.scaled_dot_product_attention = attention
        for module, dropout in recurrent.items():
            module.dropout = dropout
