"""Let the loss read logits that are split by words, so that no shard has the logits of all words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from paralab.errors import ParalabError
from paralab.workload.hooks import patched
from paralab.workload.tensor_group import TensorGroup

log_softmax = torch.Tensor.log_softmax


@contextmanager
def reading_logits(groups: Iterable[TensorGroup]) -> Iterator[None]:
    """Let the loss read split logits, in forward and backward passes. A cross entropy then exchanges
    three numbers per prediction. DTensor gathers the logits for operators that need all of them,
    except for a log_softmax by itself, whose gradients are wrong in torch's context."""
    if not any(group.split_loss for group in groups):
        yield
        return
    reading = loss_parallel()
    reading.__enter__()
    try:
        with implicit_replication(), patched(torch, log_softmax=_refuse_split):
            with patched(torch.Tensor, log_softmax=_refuse_split):
                yield
    finally:  # torch's own context does not end after an exception
        reading.__exit__(None, None, None)


def _refuse_split(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if isinstance(input, DTensor):
        raise ParalabError(
            "tp: the loss calls log_softmax, but it called cross_entropy in the proof.",
            fix="F.cross_entropy for all samples",
        )
    return log_softmax(input, *args, **kwargs)
