"""Collectives and facts about the ranks."""

import functools
import os
import random

import numpy as np
import torch
import torch.distributed as dist


def is_distributed():
    return dist.is_available() and dist.is_initialized()


def get_rank():
    return dist.get_rank() if is_distributed() else 0


def get_world_size():
    return dist.get_world_size() if is_distributed() else 1


def is_main_process():
    return get_rank() == 0


def main_process_only(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if is_main_process():
            return function(*args, **kwargs)
        return None

    return wrapped


def synchronize():
    if is_distributed():
        dist.barrier()


def set_up():
    if "RANK" not in os.environ:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def tear_down():
    if is_distributed():
        dist.destroy_process_group()


def seed_all(seed):
    seed = seed + get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def average(values):
    """Return the mean over all ranks for a dictionary of numbers."""
    world = get_world_size()
    if world < 2:
        return values
    names = sorted(values)
    stacked = torch.stack([torch.as_tensor(values[name], dtype=torch.float32) for name in names])
    dist.all_reduce(stacked)
    stacked /= world
    return {name: value.item() for name, value in zip(names, stacked, strict=True)}


def any_rank(flag, device):
    """Return True on all ranks if the value is true on one."""
    vote = torch.tensor(int(flag), device=device)
    if is_distributed():
        dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())
