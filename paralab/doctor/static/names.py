"""Library names, and the usual meaning of names in a training script."""

from __future__ import annotations

import re
from functools import cache

from paralab.record.collective_arguments import COLLECTIVE_ARGUMENTS, POINT_TO_POINT

DDP = "torch.nn.parallel.DistributedDataParallel"
DP = "torch.nn.DataParallel"
FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
SCALER = "torch.amp.GradScaler"
AUTOCAST = "torch.amp.autocast"
LOADER = "torch.utils.data.DataLoader"
SAMPLER = "torch.utils.data.DistributedSampler"
INIT = "torch.distributed.init_process_group"
SET_DEVICE = "torch.cuda.set_device"
ACCELERATOR = "accelerate.Accelerator"

# torch has moved these over the years; the last part of the dotted name identifies them.
_BY_LAST = {
    "DistributedDataParallel": DDP,
    "DistributedDataParallelCPU": DDP,
    "DataParallel": DP,
    "FullyShardedDataParallel": FSDP,
    "GradScaler": SCALER,
    "autocast": AUTOCAST,
    "DataLoader": LOADER,
    "DistributedSampler": SAMPLER,
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
    "clip_grad_value_": "torch.nn.utils.clip_grad_value_",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "convert_sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
}
_PREFIXES = (
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.cuda.amp.", "torch.amp."),
    ("torch.cpu.amp.", "torch.amp."),
    ("torch.utils.data.distributed.", "torch.utils.data."),
    ("torch.utils.data.dataloader.", "torch.utils.data."),
    ("torch.nn.modules.", "torch.nn."),
    ("accelerate.accelerator.", "accelerate."),
)

# The position of the `group` argument.
GROUP_POSITION = {
    name: group
    for name, (_, group) in COLLECTIVE_ARGUMENTS.items()
    if name not in POINT_TO_POINT and group is not None
}
COLLECTIVES = frozenset(GROUP_POSITION) | {
    *("all_reduce_coalesced", "all_gather_coalesced", "new_group")
}
# Methods of Accelerate and Lightning Fabric that every process must call.
FRAMEWORK_COLLECTIVES = frozenset(
    {"wait_for_everyone", "gather_for_metrics", "pad_across_processes"}
)
# Calls that gather the parts of a sharded model from all ranks.
GATHERS = frozenset(
    "full_tensor get_model_state_dict get_optimizer_state_dict get_state_dict state_dict "
    "optim_state_dict full_optim_state_dict summon_full_params".split()
)
SHARDS = ("FullyShardedDataParallel", "FSDP", "fully_shard", "distribute_tensor")

_KIND_OF_MADE = {
    DDP: "ddp",
    DP: "dp",
    FSDP: "fsdp",
    SCALER: "scaler",
    AUTOCAST: "autocast",
    LOADER: "loader",
    SAMPLER: "distributed sampler",
    ACCELERATOR: "accelerator",
    "torch.distributed.get_rank": "rank",
    "torch.distributed.get_node_local_rank": "rank",
    "torch.distributed.get_world_size": "world",
    "torch.cuda.device_count": "device count",
    "torch.no_grad": "no_grad",
    "torch.inference_mode": "no_grad",
    "argparse.ArgumentParser.parse_args": "arguments",
}
_OPTIMIZERS = ("AdamW", "Adafactor", "Lion")
_LOSSES = ("cross_entropy", "mse_loss", "nll_loss", "l1_loss", "binary_cross_entropy", "kl_div")

# The usual meaning of a name that nothing in the script explains.
_PART = r"(main|master|root|chief|primary)"
_MEANINGS = {
    "rank": r"(global_|local_|node_local_|ddp_|ddp_local_|my_?|process_|proc_|worker_|dist_|g|l)?"
    r"rank(_id)?|proc_id|(local_)?process_index",
    "world": r"(dist_|ddp_|global_)?world_?size|num_processes|n_?procs|num_replicas",
    "main": rf"_*(is|if|on|am_i|i_am)_{_PART}(_process|_proc|_rank|_node|_worker|_gpu)?"
    rf"|_*{_PART}_(process|proc|rank|worker|gpu)"
    r"|_*is_(local_)?(rank_?(0|zero)|rank0|first_(rank|process|worker)|global_zero"
    r"|world_process_zero|local_process_zero|main_process|world_master|global_master|master_rank)"
    r"|_*is_local_(main|master)(_process)?|rank_?(0|zero)",
    "distributed": r"_*(is_|use_|using_|do_|enable_)?(multiprocessing_)?"
    r"(distributed|ddp|dist|multi_?gpu)"
    r"(_run|_mode|_training|_enabled|_is_initialized|_initialized|_avail_and_initialized"
    r"|_available_and_initialized|_available|_launch)?",
}
_meanings = [
    (kind, re.compile(rf"(?:{pattern})\Z", re.IGNORECASE)) for kind, pattern in _MEANINGS.items()
]
_words = {
    "optimizer": re.compile(r"(\w*_)?(optimizer|optim|opt)(_\w+)?\Z", re.I),
    "scaler": re.compile(r"(\w*_)?(grad_)?scaler\Z", re.I),
    "loader": re.compile(r"(\w*_)?(data_?)?loaders?(_\w+)?\Z", re.I),
    "sampler": re.compile(r"(\w*_)?sampler(_\w+)?\Z", re.I),
    "module": re.compile(r"(\w*_)?(model|u?net|network|backbone)(_\w+)?\Z", re.I),
    "scheduler": re.compile(r"(\w*_)?(scheduler|sched|lr_sched)(_\w+)?\Z", re.I),
    "accelerator": re.compile(r"accelerator\Z", re.I),
}


_model_class = re.compile(r"_?[A-Z]\w*?(Net|Model|Transformer)\w{0,3}|Net|Model")


@cache
def canonical(name: str) -> str:
    """Shorten `torch.nn.parallel.distributed.DistributedDataParallel` to its public name."""
    if not name.startswith(("torch.", "accelerate.")):
        return name
    parts = name.split(".")
    if name.startswith("torch.") and parts[-1] in _BY_LAST:
        return _BY_LAST[parts[-1]]
    if name.startswith("torch.") and len(parts) > 2 and parts[-2] in _BY_LAST:
        return f"{_BY_LAST[parts[-2]]}.{parts[-1]}"
    for prefix, short in _PREFIXES:
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name


def last_names(target: str) -> set[str]:
    """Return the last parts of the names under which an object may be imported."""
    return {target.rpartition(".")[2]} | {last for last, name in _BY_LAST.items() if name == target}


@cache
def meaning(name: str) -> str | None:
    """Return `rank`, `world`, `main`, or `distributed` if the name usually means that."""
    return next((kind for kind, pattern in _meanings if pattern.match(name)), None)


@cache
def sounds_like(name: str) -> str | None:
    """Return what an unresolved variable most likely refers to: optimizer, scaler, loader, …"""
    return next((kind for kind, pattern in _words.items() if pattern.match(name)), None)


def is_model_class(name: str) -> bool:
    """Return whether a name looks like an imported model class: `Net`, `ResNet50`, `GPTModel`."""
    return bool(_model_class.fullmatch(name))


@cache
def kind_of_made(target: str) -> str | None:
    """Return the kind of value that a library call returns."""
    if target in _KIND_OF_MADE:
        return _KIND_OF_MADE[target]
    head, _, last = target.rpartition(".")
    if head.startswith("torch.optim.lr_scheduler") or last.endswith(
        ("_schedule_with_warmup", "LRScheduler", "get_scheduler")
    ):
        return "scheduler"
    if (head.startswith("torch.optim") and last[:1].isupper()) or last in _OPTIMIZERS:
        return "optimizer"
    if head == "torch.utils.data":
        return "sampler" if last.endswith("Sampler") else "dataset"
    if head == "torch.nn" and last[:1].isupper():
        return "loss function" if last.endswith("Loss") else "module"
    if head == "torch.nn.functional" and last.startswith(_LOSSES):
        return "loss"
    return None
