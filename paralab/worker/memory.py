"""Memory of a device: from the allocator on CUDA; counted from tensors on CPU devices, which share
one process and its heap."""

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
    """Bytes that autograd keeps for the backward pass, per device, counted in one step (it costs
    time; the step is a warm-up)."""

    def __init__(self, parameters: Iterable[nn.Parameter], enabled: bool) -> None:
        self.enabled = enabled
        self.peak: dict[str, int] = {}
        self._known: set[int] = set()
        self.ignore(parameters)
        self._live: dict[str, dict[int, tuple[int, Any]]] = {}  # storage -> (bytes, piece)
        self._lock = threading.Lock()

    def ignore(self, parameters: Iterable[nn.Parameter]) -> set[int]:
        """Parameters are no activations, though autograd keeps them as well."""
        places = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._known |= places
        return places

    def forget(self, places: set[int]) -> None:
        """These parameters are gone, and other tensors may lie there."""
        self._known -= places

    def know_only(self, parameters: Iterable[nn.Parameter]) -> None:
        """Other parameters are gone, and their memory may become that of activations."""
        self._known.clear()
        self.ignore(parameters)

    @contextmanager
    def counting(self, device: str, piece: Any = None) -> Iterator[None]:
        """Count what the forward pass in this thread saves, for this device (and for a piece that
        is done before others)."""
        if not self.enabled:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self.saved(device, tensor, piece), lambda tensor: tensor
        ):
            yield

    def saved(self, device: str, tensor: torch.Tensor, piece: Any = None) -> torch.Tensor:
        storage = tensor.untyped_storage()
        with self._lock:
            if self.enabled and storage.data_ptr() not in self._known:
                live = self._live.setdefault(device, {})
                live[storage.data_ptr()] = storage.nbytes(), piece
                self.peak[device] = max(
                    self.peak.get(device, 0), sum(size for size, _ in live.values())
                )
        return tensor

    def backward_done(self, piece: Any = None) -> None:
        """The graph (of this piece) is gone, and what it kept with it."""
        with self._lock:
            if piece is None:
                self._live.clear()
            for live in self._live.values():
                for storage in [key for key, (_, owner) in live.items() if owner == piece]:
                    del live[storage]


def tensor_bytes(values: Iterable[torch.Tensor | None]) -> int:
    return sum(stored_bytes(local(value)) for value in values if value is not None)


def stored_bytes(value: torch.Tensor) -> int:
    return (
        value.nbytes
        if value.layout == torch.strided
        else value._values().nbytes + value._indices().nbytes
    )


def parts(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, activations: int | None
) -> dict[str, Any]:
    """What a device holds, by kind."""
    states = [
        tensor for parameter in parameters for tensor in tensors(optimizer.state.get(parameter, {}))
    ]
    return {
        "parameters": tensor_bytes(parameters),
        "gradients": tensor_bytes(parameter.grad for parameter in parameters),
        "optimizer": tensor_bytes(states),
        "activations": activations,
    }
