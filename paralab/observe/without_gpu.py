"""Run a trial on a machine without a GPU: replace CUDA with the CPU where possible, and report each
replacement as an event.

torch.cuda.is_available() stays False, so a script that calls it can choose its own device.
"""

import os
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from paralab.observe.rank import Rank
from paralab.observe.trial import replace

NOTHING = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "init")
ZERO = (
    *("current_device", "memory_allocated", "max_memory_allocated"),
    *("memory_reserved", "max_memory_reserved"),
)


def install(rank: Rank) -> None:
    if torch.cuda.is_available():
        return
    reported: set[str] = set()

    def say(what: str, by: str) -> None:
        if what not in reported:
            reported.add(what)
            rank.emit("replaced", what=what, by=by)

    def move(call: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        return call(module, *_replace_devices(args, say, True), **_swapped_names(kwargs, say))

    def to_cuda(call: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        say("model.cuda()", "the model on the CPU")
        return module

    def count_devices(call: Any) -> int:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
        say("torch.cuda.device_count()", f"{ranks_here}")
        return ranks_here

    _Swapping(say).__enter__()  # type: ignore[no-untyped-call]
    replace(nn.Module, "to", move)
    replace(nn.Module, "cuda", to_cuda)
    for name in NOTHING:
        replace(torch.cuda, name, lambda call, *a, **k: None)
    for name in ZERO:
        replace(torch.cuda, name, lambda call, *a, **k: 0)
    replace(torch.cuda, "device_count", count_devices)
    _replace_processes(say)
    load = lambda call, *a, **k: call(*a[:1], **{**k, "map_location": "cpu"})  # noqa: E731
    replace(torch.serialization, "load", load, torch)


def _replace_processes(say: Any) -> None:
    def initialize(call: Any, *args: Any, **kwargs: Any) -> Any:
        backend = args[0] if args else kwargs.pop("backend", None)
        if kwargs.pop("device_id", None) is not None:
            say("device_id of the process group", "no device")
        if backend is None or "nccl" in str(backend):
            say(f"the backend {backend}", "gloo")
            backend = "gloo"
        return call(backend, *args[1:], **kwargs)

    def wrap(call: Any, wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("device_ids") or kwargs.get("output_device") is not None:
            say("device_ids of DistributedDataParallel", "none")
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        return call(wrapper, module, *((None, None)[: len(args[:2])]), *args[2:], **kwargs)

    replace(c10d, "init_process_group", initialize, torch.distributed)
    replace(DistributedDataParallel, "__init__", wrap)


class _Swapping(TorchFunctionMode):
    """Replaces devices in the arguments of every torch function."""

    def __init__(self, say: Any) -> None:
        super().__init__()
        self.say = say

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "cuda" and args:
            self.say("tensor.cuda()", "the tensor on the CPU")
            return args[0]
        if name == "pin_memory" and args:
            return args[0]
        swapped = (*args[:1], *_replace_devices(args[1:], self.say, name == "to")) if args else args
        return function(*swapped, **_swapped_names(kwargs or {}, self.say))


def _replace_devices(values: tuple[Any, ...], say: Any, numbers: bool) -> tuple[Any, ...]:
    """Replace CUDA devices with the CPU. With `numbers`, the first argument may be a number."""
    return tuple(_swap(value, say, numbers and place == 0) for place, value in enumerate(values))


def _swapped_names(values: dict[str, Any], say: Any) -> dict[str, Any]:
    return {n: _swap(value, say, True) if n == "device" else value for n, value in values.items()}


def _swap(value: Any, say: Any, number: bool) -> Any:
    is_number = number and isinstance(value, int) and not isinstance(value, bool)
    is_device = isinstance(value, torch.device) and value.type == "cuda"
    if is_number or is_device or (isinstance(value, str) and value.split(":")[0] == "cuda"):
        say("device cuda", "cpu")
        return torch.device("cpu")
    return value
