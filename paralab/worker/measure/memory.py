"""Measure device memory. On CUDA, the allocator reports it. Virtual CPU devices share one heap, so
we count their tensors instead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from paralab.worker.sharding.shards import local
from paralab.workload.batch import tensors
from paralab.workload.recompute import Watched, watch_nothing


class ActivationMeter:
    """Counts the bytes that autograd saves on each device. This is slow, so use it in one step."""

    def __init__(self, parameters: Iterable[nn.Parameter], enabled: bool) -> None:
        self.enabled = enabled
        self.peak: dict[str, int] = {}
        self.ignored = addresses(parameters)  # these are not activations
        # Address -> (bytes, piece, storage)
        self._live: dict[str, dict[int, tuple[int, Any, StorageWeakRef]]] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()  # `place` is the thread's device and piece

    @contextmanager
    def counting(self, device: str, piece: Any = None) -> Iterator[None]:
        """Count what autograd saves in this context and thread, for this `piece` of the batch."""
        if not self.enabled:
            yield
            return

        def save(tensor: torch.Tensor) -> torch.Tensor:
            self._add(tensor, device, piece)
            return tensor

        self._thread.place = device, piece
        try:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                yield
        finally:
            del self._thread.place

    def _add(self, kept: Any, device: str, piece: Any) -> None:
        with self._lock:
            live = self._live.setdefault(device, {})
            for tensor in tensors(kept) if self.enabled else ():
                storage = local(tensor).untyped_storage()
                if storage.data_ptr() not in self.ignored:
                    live[storage.data_ptr()] = storage.nbytes(), piece, StorageWeakRef(storage)
            if self.enabled:
                self._note_peak(device, (size for size, _, _ in live.values()))

    def _note_peak(self, device: str, sizes: Iterable[int]) -> None:
        self.peak[device] = max(self.peak.get(device, 0), sum(sizes))

    def watch(self, block: nn.Module) -> Watched:
        """Count the bytes that a recomputed block keeps, and those that exist while it is
        recomputed. Its activations then add to the tensors that other blocks keep."""
        place = getattr(self._thread, "place", None)
        if not self.enabled or place is None:
            return watch_nothing(block)
        return partial(self._keep, *place), partial(self._recomputing, block, place[0])

    def _keep(self, device: str, piece: Any, kept: Any) -> None:
        if kept is None:  # this version of torch does not say what `selective` keeps
            self.enabled = False
            self.peak.clear()
        self._add(kept, device, piece)

    @contextmanager
    def _recomputing(self, block: nn.Module, device: str) -> Iterator[None]:
        with self._lock:
            live = self._live.get(device, {}).items()
            # Skip tensors that the backward pass has already freed.
            sizes = {key: size for key, (size, _, storage) in live if not storage.expired()}
        # Ignore the block's parameters, which fsdp has gathered again.
        ignored = self.ignored | addresses(map(local, block.parameters()))

        def note(tensor: torch.Tensor) -> None:
            storage = local(tensor).untyped_storage()
            if storage.data_ptr() not in ignored:
                sizes[storage.data_ptr()] = storage.nbytes()
                with self._lock:
                    self._note_peak(device, sizes.values())

        with save_also(note):
            yield

    def backward_done(self, piece: Any = None) -> None:
        """Subtract all tensors that this piece's graph saved, because the graph is now freed."""
        with self._lock:
            if piece is None:
                self._live.clear()
            for live in self._live.values():
                for storage in [key for key, (_, owner, _) in live.items() if owner == piece]:
                    del live[storage]


@contextmanager
def save_also(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Count the tensors that autograd saves, and pass them on to torch's checkpoint."""
    private: Any = torch._C._autograd
    pack, unpack = private._top_saved_tensors_default_hooks(True)

    def save(tensor: torch.Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(save, unpack):
        yield


def addresses(parameters: Iterable[torch.Tensor]) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in parameters}


def num_bytes(tree: Any) -> int:
    """Count the bytes of all tensors in the tree on this rank."""
    return sum(stored_bytes(local(tensor)) for tensor in tensors(tree))


def stored_bytes(value: torch.Tensor) -> int:
    if value.layout == torch.strided:
        return value.nbytes
    return value._values().nbytes + value._indices().nbytes
