"""Checkpoints: what is saved and loaded, where, and whether the names match the model."""

import os
from typing import Any

import torch
from torch import nn

from paralab.observe.models import Models
from paralab.observe.rank import Fields, Rank
from paralab.observe.wrappers import argument, is_inside, wrap

MOST_KEYS = 20


def install(rank: Rank, models: Models) -> None:
    def save(*args: Any, **kwargs: Any) -> Fields | None:
        if is_inside(rank, "collective", "save"):  # object collectives call torch.save
            return None
        keys = _keys(argument(args, kwargs, 0, "obj"))
        return {
            "path": _path(argument(args, kwargs, 1, "f")),
            "prefixed": sum(key.startswith("module.") for key in keys),
        }

    def load(*args: Any, **kwargs: Any) -> Fields | None:
        if is_inside(rank, "collective", "load"):
            return None
        where = argument(args, kwargs, 1, "map_location")
        return {
            "path": _path(argument(args, kwargs, 0, "f")),
            "map_location": None if where is None else str(where),
        }

    def load_state(module: nn.Module, *args: Any, **kwargs: Any) -> Fields | None:
        if is_inside(rank, "load_state"):
            return None
        own = set(module.state_dict().keys())
        given = set(argument(args, kwargs, 0, "state_dict", {}))
        return {
            "model_class": type(module).__name__,
            "model": models.numbers.get(id(module)),
            "strict": bool(argument(args, kwargs, 1, "strict", True)),
            "matched": len(own & given),
            "missing": sorted(own - given)[:MOST_KEYS],
            "unexpected": sorted(given - own)[:MOST_KEYS],
            "total": len(own),
        }

    wrap(rank, torch.serialization, "save", "save", save, None, torch)
    wrap(rank, torch.serialization, "load", "load", load, None, torch)
    wrap(rank, nn.Module, "load_state_dict", "load_state", load_state)


def _path(target: Any) -> str | None:
    try:
        return str(os.path.abspath(os.fspath(target)))
    except TypeError:  # an open file
        name = getattr(target, "name", None)
        return os.path.abspath(name) if isinstance(name, str) else None


def _keys(value: Any) -> list[str]:
    """Return the names of the tensors in a state dict, which may be part of a checkpoint."""
    parts = [value, *value.values()] if isinstance(value, dict) else []
    for part in parts:
        items = part.items() if isinstance(part, dict) else ()
        names = [k for k, v in items if isinstance(v, torch.Tensor) and isinstance(k, str)]
        if names:
            return names
    return []
