"""GPU memory that other processes can map, through the CUDA driver.

torch can share its tensors too, but it keeps their reference counts in named files, which remain
after kill -9. The driver frees this memory when the last process that maps it exits.
"""

from __future__ import annotations

import ctypes
import functools

import torch

HANDLE_BYTES = 64
USE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class GpuMemory:
    """GPU memory that this process allocated or mapped, as a tensor of bytes."""

    def __init__(self, address: int, size: int, device: torch.device, mapped: bool) -> None:
        self.address, self.mapped = address, mapped
        # The memory may be on another GPU. This GPU's kernels can still use it.
        storage = torch._C._construct_storage_from_data_pointer(address, device, size)
        self.data = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    @classmethod
    def allocate(cls, size: int, device: torch.device) -> GpuMemory:
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return cls(address.value, size, device, mapped=False)

    @classmethod
    def open(cls, handle: bytes, size: int, device: torch.device) -> GpuMemory:
        """Map another process's memory."""
        address, shared = ctypes.c_uint64(), Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), shared, USE_PEER_ACCESS)
        return cls(address.value, size, device, mapped=True)

    def handle(self) -> bytes:
        """Return what another process needs to map this memory."""
        handle = Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def close(self) -> None:
        _call(
            "cuIpcCloseMemHandle" if self.mapped else "cuMemFree_v2", ctypes.c_uint64(self.address)
        )


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {status}"
        raise RuntimeError(f"{name}: {reason}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
