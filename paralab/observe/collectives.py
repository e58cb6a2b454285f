"""Collectives and process groups. Each group numbers its collectives, including those that DDP runs
in C++. DDP's collectives belong to the forward, backward, or wrap event whose `seq` spans them."""

import functools
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paralab.observe.light import Light
from paralab.observe.rank import Fields, Rank
from paralab.observe.wrappers import argument, is_inside, wrap
from paralab.record.collective_arguments import COLLECTIVE_ARGUMENTS, PEERS, POINT_TO_POINT

# A collective inside one of these operations belongs to it.
WITHIN = ("collective", "wrap", "init", "pipeline", "save", "load")
NAMES = "tensor object_list obj input_tensor input output tensor_list input_list".split()


def install(rank: Rank) -> None:
    for name in COLLECTIVE_ARGUMENTS:
        describe, conclude = partial(_describe, rank, name), partial(_conclude, rank, name)
        wrap(rank, c10d, name, "collective", describe, conclude, dist, light=_light(rank, name))
    initialize, made = partial(_initialize, rank), lambda group, *a, **k: _group(group)
    wrap(rank, c10d, "init_process_group", "init", initialize, lambda *a, **k: _group(None), dist)
    destroyed = lambda group=None: {"group": name_of(group)}  # noqa: E731
    wrap(rank, c10d, "destroy_process_group", "destroy", destroyed, None, dist)
    wrap(rank, c10d, "new_group", "group", lambda *a, **k: {}, made, dist)


def sequence(group: Any = None) -> int | None:
    """Return the number of the last collective that this rank began in a group. Return None if
    there is no group, if this rank is not in it, or if the backend does not number collectives."""
    try:
        return int((group or c10d.GroupMember.WORLD)._get_sequence_number_for_group())  # type: ignore[union-attr]
    except Exception:
        return None


def name_of(group: Any = None) -> str | None:
    group = group or c10d.GroupMember.WORLD
    return getattr(group, "group_name", None)


def _group(group: Any) -> Fields:
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        return {"group": None}
    ranks = dist.get_process_group_ranks(group or c10d.GroupMember.WORLD)
    return {"group": name_of(group), "backend": str(dist.get_backend(group)), "ranks": ranks}


def _initialize(rank: Rank, /, *args: Any, **kwargs: Any) -> Fields:
    own = argument(args, kwargs, 4, "rank", -1)
    world = argument(args, kwargs, 3, "world_size", -1)
    rank.identify(*((own, world) if own is not None and own >= 0 else ()))
    timeout = argument(args, kwargs, 2, "timeout")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return {
        "backend": str(argument(args, kwargs, 0, "backend")),
        "world": world if world and world > 0 else None,
        "timeout_seconds": timeout.total_seconds() if timeout is not None else None,
        "address": _address(os.environ) if _by_environment(args, kwargs) else None,
        "agent": _address(_read_launch_environment()) if by_agent else None,
    }


def _by_environment(args: tuple[Any, ...], kwargs: Fields) -> bool:
    method, store = argument(args, kwargs, 1, "init_method"), argument(args, kwargs, 5, "store")
    return store is None and (method is None or str(method).startswith("env://"))


def _address(environment: Mapping[str, str]) -> str | None:
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    return f"{address}:{port}" if address and port else None


def _read_launch_environment() -> dict[str, str]:
    """Return the launcher's environment, without the program's changes. Linux only."""
    try:
        pairs = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _describe(rank: Rank, name: str, /, *args: Any, **kwargs: Any) -> Fields | None:
    if is_inside(rank, *WITHIN):
        return None
    tensor, group = _find_tensor_and_group(name, args, kwargs)
    is_tensor = tensor is not None
    before = None if name in POINT_TO_POINT else sequence(group)
    reduces = name in ("all_reduce", "reduce")
    operator = argument(args, kwargs, 1 if name == "all_reduce" else 2, "op", "SUM")
    return {
        "op": name,
        "group": name_of(group),
        "peer": _peer(name, group, args, kwargs),
        "seq": [before + 1, before + 1] if before is not None else None,
        "shape": list(tensor.shape) if is_tensor else None,
        "dtype": _dtype(tensor.dtype) if is_tensor else None,
        "reduction": str(operator).rpartition(".")[2] if reduces else None,
        "in_graph": bool(is_tensor and tensor.grad_fn is not None and torch.is_grad_enabled()),
        "value": _value(tensor) if is_tensor and reduces else None,
        "asynchronous": bool(kwargs.get("async_op", False)),
    }


def _conclude(rank: Rank, name: str, result: Any, /, *args: Any, **kwargs: Any) -> Fields:
    tensor = argument(args, kwargs, 0, "tensor")
    overwrites = name in ("all_reduce", "reduce", "broadcast")
    if overwrites and isinstance(tensor, torch.Tensor) and torch.is_grad_enabled():
        rank.overwritten = tensor.grad_fn
    first, last = rank_first(rank), sequence(_find_tensor_and_group(name, args, kwargs)[1])
    return {"seq": [first, last]} if last is not None and first is not None else {}


def _light(rank: Rank, name: str) -> Light:
    def values(args: tuple[Any, ...], kwargs: Fields) -> tuple[Any, ...] | None:
        if is_inside(rank, *WITHIN):
            return None
        tensor, group = _find_tensor_and_group(name, args, kwargs)
        shape, dtype = (None, None) if tensor is None else (tensor.shape, _dtype(tensor.dtype))
        return name, name_of(group), shape, dtype

    def count(args: tuple[Any, ...], kwargs: Fields) -> int | None:
        return (
            None
            if name in POINT_TO_POINT
            else sequence(_find_tensor_and_group(name, args, kwargs)[1])
        )

    return Light(rank, "collective", ("op", "group", "shape", "dtype"), values, count)


def _find_tensor_and_group(name: str, args: tuple[Any, ...], kwargs: Fields) -> tuple[Any, Any]:
    value_at, group_at = COLLECTIVE_ARGUMENTS[name]
    value: Any = None
    if value_at is not None:
        named = (kwargs[key] for key in NAMES if key in kwargs)
        value = args[value_at] if len(args) > value_at else next(named, None)
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    group = None if group_at is None else argument(args, kwargs, group_at, "group")
    return first if isinstance(first, torch.Tensor) else None, group


def _peer(name: str, group: Any, args: tuple[Any, ...], kwargs: Fields) -> int | None:
    """Return the global rank of the root, or of the other rank. The call may give its rank within
    the group."""
    if name not in PEERS:
        return None
    given = args[PEERS[name]] if len(args) > PEERS[name] else None
    peer = given if given is not None else kwargs.get("src", kwargs.get("dst"))
    inside = kwargs.get("group_src", kwargs.get("group_dst"))
    if peer is None and inside is not None:
        peer = dist.get_process_group_ranks(group)[inside]
    return peer


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _value(tensor: torch.Tensor) -> float | None:
    if tensor.numel() != 1 or tensor.device.type != "cpu":
        return None
    if tensor.dtype is torch.bool or tensor.is_complex():
        return None
    value = float(tensor.detach())
    return value if math.isfinite(value) else None


def rank_first(rank: Rank) -> int | None:
    seq = rank.doing[-1].get("seq") if rank.doing else None
    return seq[0] if seq else None
