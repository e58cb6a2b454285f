"""Flat, contiguous views of tensors, for collectives that work on ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def flat_inputs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    yield [tensor.detach().contiguous().view(-1) for tensor in tensors]


@contextmanager
def flat_outputs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield writable views. For a tensor that is not contiguous, yield a copy, and copy it back
    afterward."""
    plain = [tensor.detach() for tensor in tensors]
    flat = [each.contiguous() for each in plain]
    yield [each.view(-1) for each in flat]
    for tensor, written in zip(plain, flat, strict=True):
        if written.data_ptr() != tensor.data_ptr() or written.stride() != tensor.stride():
            tensor.copy_(written)
