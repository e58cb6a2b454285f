"""Measure device memory. On CUDA, the allocator reports it. Virtual CPU devices share one heap, so
we count their tensors instead."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paralab.worker.shards import local
from paralab.workload.batch import tensors


class ActivationMeter:
    """Counts the bytes that autograd saves on each device. This is slow: do it in one step."""

    def __init__(self, parameters: Iterable[nn.Parameter], enabled: bool) -> None:
        self.enabled = enabled
        self.peak: dict[str, int] = {}
        self.ignored = addresses(parameters)  # autograd saves them, but they are not activations
        self._live: dict[str, dict[int, tuple[int, Any]]] = {}  # storage -> (bytes, piece)
        self._lock = threading.Lock()

    @contextmanager
    def counting(self, device: str, piece: Any = None) -> Iterator[None]:
        """Count what autograd saves in this block and thread, for this `piece` of the batch."""
        if not self.enabled:
            yield
            return

        def save(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            with self._lock:
                if self.enabled and storage.data_ptr() not in self.ignored:
                    live = self._live.setdefault(device, {})
                    live[storage.data_ptr()] = storage.nbytes(), piece
                    total = sum(size for size, _ in live.values())
                    self.peak[device] = max(self.peak.get(device, 0), total)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            yield

    def backward_done(self, piece: Any = None) -> None:
        """Subtract everything that this piece's graph had saved: the graph is now freed."""
        with self._lock:
            if piece is None:
                self._live.clear()
            for live in self._live.values():
                for storage in [key for key, (_, owner) in live.items() if owner == piece]:
                    del live[storage]


def addresses(parameters: Iterable[nn.Parameter]) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in parameters}


def num_bytes(tree: Any) -> int:
    """Count the bytes of all tensors in the tree on this rank."""
    return sum(stored_bytes(local(tensor)) for tensor in tensors(tree))


def stored_bytes(value: torch.Tensor) -> int:
    if value.layout == torch.strided:
        return value.nbytes
    return value._values().nbytes + value._indices().nbytes
