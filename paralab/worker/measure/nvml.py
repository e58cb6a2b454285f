"""GPU load and memory from NVML, through ctypes, so no package is needed."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class Nvml:
    """The values that `nvidia-smi` shows. If NVML is unavailable, `reason` says why."""

    def __init__(self, devices: list[str]) -> None:
        self.reason: str | None = None
        self._handles: dict[str, ctypes.c_void_p] = {}
        if not devices:
            return
        try:
            self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
            self._check("nvmlInit_v2")
            for device in devices:
                handle = ctypes.c_void_p()
                # Match by UUID, because NVML numbers all GPUs, but torch numbers only those in
                # CUDA_VISIBLE_DEVICES.
                uuid = f"GPU-{torch.cuda.get_device_properties(torch.device(device).index).uuid}"
                self._check("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
                self._handles[device] = handle
        except (OSError, AttributeError, RuntimeError) as error:
            self.reason = f"NVML cannot be read: {error}"

    def read(self, device: str) -> dict[str, Any]:
        """Read the share of time with a kernel running, and the memory used by all processes."""
        if self.reason:
            return {}
        load, memory = _Utilization(), _Memory()
        try:
            self._check("nvmlDeviceGetUtilizationRates", self._handles[device], ctypes.byref(load))
            self._check("nvmlDeviceGetMemoryInfo", self._handles[device], ctypes.byref(memory))
        except RuntimeError as error:
            self.reason = f"NVML cannot be read: {error}"
            return {}
        shares = {"utilization": load.gpu / 100, "memory_utilization": load.memory / 100}
        return {**shares, "used_bytes": memory.used}

    def _check(self, call: str, *arguments: Any) -> None:
        code = getattr(self._library, call)(*arguments)
        if code:
            raise RuntimeError(f"{call} returned {code}")
