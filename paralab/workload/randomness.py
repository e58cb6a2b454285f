"""Users' code that draws random numbers must draw the same ones in every process: the ranks share
their data by this alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def seed_everything(seed: int, gpus: bool = True) -> None:
    """torch, random and numpy (if the user has imported it), for the rest of this process."""
    (torch.manual_seed if gpus else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


@contextmanager
def seeded(seed: int, position: int = 0) -> Iterator[None]:
    """Every usual source of randomness set from (seed, position), and put back afterwards."""
    value = (seed * 1_000_000_007 + position) % 2**32
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            value
        )  # not torch.manual_seed: it would seed the GPUs as well
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
    """Dropout switched off in this process, as modules, as functions and inside attention and
    recurrent layers.

    Two trainings whose dropout draws different numbers cannot be compared, and a real mistake would
    hide behind it.
    """
    names = [
        "dropout",
        "alpha_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
    ]
    kept = {name: getattr(nn.functional, name) for name in [*names, "scaled_dot_product_attention"]}
    recurrent = {m: m.dropout for m in model.modules() if isinstance(m, nn.RNNBase)}
    attention = kept["scaled_dot_product_attention"]

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
        for name, function in kept.items():
            setattr(nn.functional, name, function)
        for module, share in recurrent.items():
            module.dropout = share
