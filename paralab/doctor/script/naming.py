"""What the names of libraries mean, however they were imported: one canonical name each, and the
role of what they make."""

from __future__ import annotations

DDP = "torch.nn.parallel.DistributedDataParallel"
DP = "torch.nn.DataParallel"
SCALER = "torch.amp.GradScaler"
AUTOCAST = "torch.amp.autocast"
LOADER = "torch.utils.data.DataLoader"
SAMPLER = "torch.utils.data.DistributedSampler"
FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
RANK_NAMES = {
    "rank",
    "local_rank",
    "global_rank",
    "proc_id",
    "rank_id",
}  # of parameters and options

# The last part of a dotted torch name tells these apart, wherever torch has put them over the
# years.
_BY_LAST = {
    "DistributedDataParallel": DDP,
    "DataParallel": DP,
    "GradScaler": SCALER,
    "autocast": AUTOCAST,
    "DataLoader": LOADER,
    "DistributedSampler": SAMPLER,
    "FullyShardedDataParallel": FSDP,
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
    "clip_grad_value_": "torch.nn.utils.clip_grad_value_",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "convert_sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "checkpoint": "torch.utils.checkpoint.checkpoint",
}
_PREFIXES = (
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.nn.functional.", "torch.nn.functional."),
    ("torch.cuda.amp.", "torch.amp."),
    ("torch.cpu.amp.", "torch.amp."),
    ("torch.utils.data.distributed.", "torch.utils.data."),
    ("torch.utils.data.dataloader.", "torch.utils.data."),
    ("torch.nn.modules.", "torch.nn."),
)

_COLLECTIVES = """
    all_reduce all_gather all_gather_into_tensor all_gather_object gather gather_object scatter scatter_object_list broadcast
    broadcast_object_list reduce reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single barrier monitored_barrier
    all_reduce_coalesced all_gather_coalesced new_group
"""
COLLECTIVES = frozenset(f"torch.distributed.{name}" for name in _COLLECTIVES.split())

_MADE_ROLES = {
    DDP: "ddp",
    DP: "dp",
    FSDP: "fsdp",
    SCALER: "scaler",
    AUTOCAST: "autocast",
    LOADER: "loader",
    SAMPLER: "sampler",
    f"{DDP}.no_sync": "no_sync",
    f"{FSDP}.no_sync": "no_sync",
    f"{DDP}.join": "join",
    "torch.no_grad": "no_grad",
    "torch.inference_mode": "no_grad",
    "torch.utils.tensorboard.SummaryWriter": "writer",
    "argparse.ArgumentParser.parse_args": "arguments",
    "torch.distributed.get_rank": "rank",
    "torch.distributed.get_node_local_rank": "rank",
    "torch.distributed.get_world_size": "world",
}
_LOSSES = (
    "Loss",
    "cross_entropy",
    "mse_loss",
    "nll_loss",
    "l1_loss",
    "binary_cross_entropy",
    "kl_div",
    "smooth_l1_loss",
)


def canonical(name: str) -> str:
    """`torch.nn.parallel.distributed.DistributedDataParallel` →
    `torch.nn.parallel.DistributedDataParallel`"""
    if not name.startswith("torch."):
        return name
    parts = name.split(".")
    if (parts[-1] in _BY_LAST and parts[-2] != "checkpoint") or name.endswith(
        "checkpoint.checkpoint"
    ):
        return _BY_LAST[parts[-1]]
    if (
        len(parts) > 2 and parts[-2] in _BY_LAST and parts[-2] != "checkpoint"
    ):  # a method: DistributedDataParallel.no_sync
        return f"{_BY_LAST[parts[-2]]}.{parts[-1]}"
    for prefix, short in _PREFIXES:
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name


def role_of_made(target: str) -> str | None:
    """The part that the result of a library call plays: ddp, scaler, loader, optimizer, scheduler,
    module, loss, …"""
    if target in _MADE_ROLES:
        return _MADE_ROLES[target]
    head, _, last = target.rpartition(".")
    if head.startswith("torch.optim.lr_scheduler") or last.endswith(
        ("_schedule_with_warmup", "LRScheduler", "get_scheduler")
    ):
        return "scheduler"
    if (head.startswith("torch.optim") and last[:1].isupper()) or last in (
        "AdamW",
        "Adafactor",
        "Lion",
    ):
        return "optimizer"
    if head == "torch.utils.data":
        return "sampler-plain" if last.endswith("Sampler") else "dataset"
    if head == "torch.nn" and last[:1].isupper():
        return "loss" if last.endswith("Loss") else "module"
    if head == "torch.nn.functional" and last.startswith(_LOSSES):
        return "loss value"
    return None
