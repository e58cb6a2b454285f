"""Users' code that draws random numbers must draw the same ones in every process: the ranks share their data by this alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, position: int = 0) -> Iterator[None]:
    """Every usual source of randomness set from (seed, position), and put back afterwards."""
    value = (seed * 1_000_000_007 + position) % 2**32
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(value)  # not torch.manual_seed: it would seed the GPUs as well
        random.seed(value)
        if numpy:
            numpy.random.seed(value)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)
