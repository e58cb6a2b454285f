"""Flat, contiguous views of tensors, for collectives that work on ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def flat_inputs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    yield [_flatten(tensor) for tensor in tensors]


@contextmanager
def flat_outputs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield writable views. For a tensor that is not contiguous, yield a copy, and copy it back
    afterward."""
    flat = [_flatten(tensor) for tensor in tensors]
    yield flat
    for tensor, written in zip(tensors, flat, strict=True):
        if written.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(written.view(tensor.shape))


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # `view(-1)` keeps an unusual stride of a tensor with one element or none.
    return plain.as_strided((plain.numel(),), (1,))
