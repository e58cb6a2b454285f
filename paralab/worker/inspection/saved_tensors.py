"""Count the bytes that autograd saves in each part of a model that runs with fake tensors.

`paralab.worker.measure.memory.ActivationMeter` does the same in a real rank. A part begins where a pipeline
would cut the model, and the last part begins with the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from paralab.worker.measure.memory import save_also
from paralab.worker.sharding.shards import local
from paralab.workload.batch import tensors
from paralab.workload.recompute import Watched

Saved = dict[int, tuple[int, StorageWeakRef]]  # storage -> bytes, and whether it still exists


class SavedTensors:
    """`recomputed` has the peak bytes in each part while it recomputes a block, or 0 if no block
    is recomputed."""

    def __init__(self, model: nn.Module) -> None:
        self.ignored = {_storage(parameter) for parameter in model.parameters()}
        self.parts: list[Saved] = [{}]
        self.recomputed = [0]

    def begin_part(self) -> None:
        self.parts.append({})
        self.recomputed.append(0)

    def counting(self) -> AbstractContextManager[Any]:
        def save(tensor: torch.Tensor) -> torch.Tensor:
            self._add(self.parts[-1], tensor)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)

    def _add(self, part: Saved, kept: Any) -> None:
        for tensor in tensors(kept):
            if (key := _storage(tensor)) not in self.ignored:
                storage = local(tensor).untyped_storage()
                # The reference also prevents another storage from reusing this key.
                part[key] = storage.nbytes(), StorageWeakRef(storage)

    def watch(self, block: nn.Module) -> Watched:
        """Count the bytes that a block keeps, and those that exist while it is recomputed."""
        number = len(self.parts) - 1
        return partial(self._keep, number), partial(self._recomputing, number)

    def _keep(self, number: int, kept: Any) -> None:
        if kept is None:
            raise ValueError("this version of torch does not say what --recompute selective keeps")
        self._add(self.parts[number], kept)

    @contextmanager
    def _recomputing(self, number: int) -> Iterator[None]:
        parts = [self.parts[number]]
        if number == len(self.parts) - 2:  # the last part is on the same device as the loss
            parts.append(self.parts[-1])
        exist = {k: v for part in parts for k, v in part.items() if not v[1].expired()}

        def note(tensor: torch.Tensor) -> None:
            self._add(exist, tensor)
            now = sum(size for size, _ in exist.values())
            self.recomputed[number] = max(self.recomputed[number], now)

        with save_also(note):
            yield


def at_starts(model: nn.Module, starts: list[str], begin: Callable[[], None]) -> Iterator[Any]:
    """Call `begin` before each of these submodules. Yield the hooks."""
    for name in starts:
        yield model.get_submodule(name).register_forward_pre_hook(lambda *_: begin())


def _storage(tensor: torch.Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)
