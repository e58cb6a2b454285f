"""The built-in workloads and their sizes, in plain numbers: `mlp`, `mlp:small`, `gpt:124m`, …"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paralab.errors import unknown


@dataclass(frozen=True)
class BuiltIn:
    """A model family: the module with its `build()`, and its sizes (default first)."""

    module: str
    about: str
    sizes: Mapping[str, Mapping[str, int]]


_MLP = {
    "base": {"dim": 1024, "layers": 6, "samples": 4096, "batch_size": 64},
    "tiny": {"dim": 16, "layers": 4, "samples": 300, "batch_size": 32},
    "small": {"dim": 256, "layers": 6, "samples": 4096, "batch_size": 64},
    "large": {"dim": 4096, "layers": 8, "samples": 1024, "batch_size": 256},
}
# The loss is so small that gradients underflow in fp16 without a GradScaler (practical 7).
_FAINT = {**_MLP["small"], "loss_divisor": 100_000}

_CNN = {
    "small": {"width": 16, "blocks": 4, "pixels": 16, "samples": 2048, "batch_size": 64},
    "tiny": {"width": 4, "blocks": 2, "pixels": 8, "samples": 300, "batch_size": 32},
    "base": {"width": 64, "blocks": 6, "pixels": 32, "samples": 4096, "batch_size": 128},
}

_GPT_NUMBERS = ("dim", "layers", "heads", "context", "samples", "batch_size")
_GPT = {
    name: dict(zip(_GPT_NUMBERS, numbers, strict=True))
    for name, numbers in {
        "small": (128, 4, 4, 128, 4096, 32),
        "tiny": (32, 3, 2, 32, 300, 32),
        "10m": (320, 8, 5, 256, 4096, 32),
        "124m": (960, 11, 15, 1024, 2048, 16),
    }.items()
}
_MOE = {
    "small": {**_GPT["small"], "experts": 8, "chosen": 2},
    "tiny": {**_GPT["tiny"], "layers": 2, "experts": 4, "chosen": 2},
}

BUILT_IN: Mapping[str, BuiltIn] = {
    "mlp": BuiltIn(
        "paralab.workload.mlp",
        "linear layers of width DIM on a synthetic batch, as in the practicals",
        {**_MLP, "faint": _FAINT},
    ),
    "cnn": BuiltIn(
        "paralab.workload.cnn", "convolutions with BatchNorm on synthetic 10-class images", _CNN
    ),
    "gpt": BuiltIn(
        "paralab.workload.gpt",
        "a byte-level transformer on the source code of Python's standard library",
        _GPT,
    ),
    "moe": BuiltIn(
        "paralab.workload.moe",
        "the same transformer, with multiple feed-forward networks of which each token uses two",
        _MOE,
    ),
}


def built_in_names() -> list[str]:
    """Return all built-in names: `mlp`, `mlp:base`, `mlp:tiny`, …"""
    families = [[name, *(f"{name}:{size}" for size in BUILT_IN[name].sizes)] for name in BUILT_IN]
    return [name for names in families for name in names]


def look_up(name: str) -> tuple[BuiltIn, Mapping[str, int]]:
    """Return a built-in workload's family and numbers, or suggest a similar name."""
    family, _, size = name.partition(":")
    if name not in built_in_names():
        raise unknown("workload", name, [*built_in_names(), "path/to/file.py:function"])
    entry = BUILT_IN[family]
    return entry, entry.sizes[size or next(iter(entry.sizes))]


def full_name(name: str) -> str:
    """Return the name with its size: `mlp` -> `mlp:base`."""
    entry, _ = look_up(name)
    return name if ":" in name else f"{name}:{next(iter(entry.sizes))}"
