"""Inspect a model that is too large for this machine, using fake tensors, which have no data."""

from __future__ import annotations

from typing import Any

import torch

from paralab.machine.host import memory_bytes
from paralab.workload.workload import Workload

COPIES = 2  # a trial step needs the parameters and their gradients


def fake_if_too_large(workload: Workload, device: str) -> Any:
    """Return a FakeTensorMode if a trial step needs more memory than this machine has, otherwise
    None.

    Count the parameters on the meta device, which needs no memory. If the model cannot be built
    there, assume that it fits."""
    try:
        with torch.device("meta"):
            needed = COPIES * sum(each.nbytes for each in workload.model().parameters())
    except Exception:
        return None
    limits = [memory_bytes()]
    if device == "cuda":
        limits += [
            torch.cuda.get_device_properties(index).total_memory
            for index in range(torch.cuda.device_count())
        ]
    if all(limit is None or needed <= limit for limit in limits):
        return None
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)
