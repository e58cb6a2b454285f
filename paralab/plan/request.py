"""`Request`: the configuration as requested by the user, with one field per option. None means "not
given".

Each field contains its option's help, choices, and strategies. `plan/option.py` lists what is
derived from them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paralab.plan.option import option, options_of
from paralab.plan.schedules import SCHEDULES
from paralab.units import plural

STRATEGIES: Mapping[str, str] = {
    "single": "one device: the baseline for every comparison",
    "dp": "DataParallel: one process splits each batch over replicas of the model "
    "and sums the gradients on device 0",
    "ddp": "DistributedDataParallel: one process per replica; "
    "gradients are all-reduced during the backward pass",
    "fsdp": "FSDP2: one process per replica; "
    "each has a shard of every parameter, gradient, and optimizer state",
    "tp": "tensor parallelism: one process per shard; "
    "each has some of the heads and columns of every layer that can be split",
    "cp": "context parallelism: one process per shard; "
    "each has a part of every sequence, and for attention, some of the heads",
    "ep": "expert parallelism: one process per shard; each trains on its part of the batch "
    "and has some of the experts",
    "mp": "model parallelism: one process with its layers on multiple devices; "
    "one device works at a time",
    "pipeline": "model parallelism with micro-batches: the devices work at the same time",
    "hybrid": "a grid of replicas × stages × shards: ddp or fsdp, a pipeline, and tensor parallelism",
    "local-sgd": "one process per replica; each takes its own optimizer steps, "
    "and every few steps the replicas average their parameters",
}
ALL = "all"  # some commands accept this instead of a strategy
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")

REPLICATED = ("dp", "ddp", "fsdp", "hybrid", "local-sgd")
STAGED = ("mp", "pipeline", "hybrid")  # strategies that cut the model into stages
SHARDED = ("fsdp", "hybrid")  # these can shard the parameters of each unit over the replicas
SPLIT = ("tp", "cp", "hybrid")  # these split layers or sequences: all shards see the same samples
DIVIDED = ("ep",)  # these divide experts: each shard sees its own samples
PIPELINED = ("pipeline", "hybrid")
BUCKETED = ("ddp", "hybrid")
COMPRESSED = ("ddp",)  # these can send compressed gradients
AVERAGED = ("local-sgd",)  # these average parameters instead of gradients
# strategies with multiple processes
BETWEEN_RANKS = ("ddp", "fsdp", "tp", "cp", "ep", "pipeline", "hybrid", "local-sgd")
COMPILED = (  # strategies that call a whole block from one thread
    "single",
    "ddp",
    "fsdp",
    "local-sgd",
)
BACKENDS = ("gloo", "nccl", "local")
COMPRESSIONS = ("fp16", "bf16", "powersgd")

# Values of some `Request` options, by name. The user sets these options, or a search varies them.
Options = dict[str, Any]

# The headings of --help
MODEL = "Model and data"
PARALLELISM = "Parallelism"
PRECISION = "Precision"
DDP = "DDP"
LENGTH = "Training length"
DEVICES = "Devices"


@dataclass(frozen=True)
class Request:
    strategy: str
    workload: str = option(
        "The model and data to train: a built-in workload or a function in your file.",
        MODEL,
        default="mlp",
        metavar="NAME|FILE.py:FUNCTION",
    )
    batch_size: int | None = option(
        "Samples per optimizer step, across all devices.", MODEL, shown="set by the workload"
    )
    samples: int | None = option(
        "Train on only the first N samples; they form one epoch.", MODEL, metavar="N", shown="all"
    )
    seed: int = option("Seed for the initial weights and the sample order.", MODEL, default=0)
    replicas: int | None = option(
        "Copies of the model; each batch is split among them.",
        PARALLELISM,
        strategies=REPLICATED,
        usual=2,
        label="×{}".format,
        always=True,
        axis=True,
    )
    stages: int | None = option(
        "Devices that share one copy of the model.",
        PARALLELISM,
        strategies=STAGED,
        usual=2,
        label=lambda number: plural(number, "stage"),
        always=True,
        axis=True,
    )
    zero: int | None = option(
        "What the replicas shard: 1 = optimizer state (with DDP), 2 = also gradients, "
        "3 = also parameters.",
        PARALLELISM,
        choices=(1, 2, 3),
        strategies=SHARDED,
        usual={"fsdp": 3},
        shown="3 for fsdp, off for hybrid",
        label="ZeRO-{}".format,
        examples=({"zero": 1}, {"zero": 2}, {"zero": 3, "stages": 2}),
    )
    shard_groups: int | None = option(
        "Groups of replicas that each hold all shards (HSDP); groups all-reduce gradients.",
        PARALLELISM,
        strategies=("fsdp",),
        usual=1,
        label=lambda number: plural(number, "shard group"),
        examples=({"shard_groups": 2, "replicas": 4},),
    )
    shards: int | None = option(
        "Devices that share each layer (tp), each sequence (cp), or the experts and the batch (ep).",
        PARALLELISM,
        strategies=(*SPLIT, *DIVIDED),
        usual={"tp": 2, "cp": 2, "ep": 2, "hybrid": 1},
        shown="1 for hybrid, otherwise 2",
        label=lambda number: plural(number, "shard") if number > 1 else "",
        always=True,
        axis=True,
        examples=({"shards": 2},),
    )
    sequence_parallel: bool | None = option(
        "To save memory, let each shard process only its part of the tokens between split layers.",
        PARALLELISM,
        strategies=("tp",),
        label=lambda _: "sequence parallel",
        examples=({"sequence_parallel": True},),
    )
    schedule: str | None = option(
        "Run each stage in its own process, with passes in this order.",
        PARALLELISM,
        choices=SCHEDULES,
        strategies=PIPELINED,
        shown="one process for all of a replica's stages; 1f1b if --shards or --zero needs more processes",
        label=str,
    )
    micro_batches: int | None = option(
        "Micro-batches that flow through the stages one after another.",
        PARALLELISM,
        strategies=PIPELINED,
        shown="2 × stages",
        label=lambda number: plural(number, "micro-batch"),
    )
    accumulate: int | None = option(
        "Accumulation steps per optimizer step; only the last one synchronizes gradients.",
        PARALLELISM,
        usual=1,
        label="accumulate {}".format,
    )
    sync_every: int | None = option(
        "Average the replicas' parameters every N steps.",
        PARALLELISM,
        strategies=AVERAGED,
        metavar="N",
        usual=10,
        label="sync every {}".format,
        always=True,
    )
    outer_lr: float | None = option(
        "DiLoCo: the learning rate of the outer optimizer, which applies the average change.",
        PARALLELISM,
        strategies=AVERAGED,
        usual=1.0,
        label="outer lr {:g}".format,
        examples=({"outer_lr": 0.7, "outer_momentum": 0.9},),
    )
    outer_momentum: float | None = option(
        "DiLoCo: the outer optimizer's Nesterov momentum.",
        PARALLELISM,
        strategies=AVERAGED,
        usual=0.0,
        label="outer momentum {:g}".format,
    )
    placement: str | None = option(
        "Where the stages run: one device each, or all on the same device.",
        PARALLELISM,
        choices=("spread", "same"),
        strategies=STAGED,
        usual="spread",
        label="{} device".format,
    )
    recompute: str | None = option(
        "Recompute repeated blocks in the backward pass: whole blocks, or only cheap operators.",
        PARALLELISM,
        choices=("full", "selective"),
        shown="keep all activations",
        label="recompute {}".format,
    )
    compile: bool | None = option(
        "Compile repeated blocks with torch.compile.",
        PARALLELISM,
        strategies=COMPILED,
        label=lambda _: "compile",
        examples=({"compile": True},),
    )
    precision: str | None = option(
        "Training precision; fp16 uses a GradScaler.",
        PRECISION,
        choices=PRECISIONS,
        usual="fp32",
        label=str,
    )
    loss_scale: float | None = option(
        "Initial scale of the GradScaler (fp16 only).", PRECISION, shown="65536"
    )
    no_scaler: bool | None = option(
        "Train in fp16 without a GradScaler, to see gradients underflow.",
        PRECISION,
        label=lambda _: "no scaler",
    )
    bucket_mb: float | None = option(
        "Size of DDP's gradient buckets in MB.",
        DDP,
        strategies=BUCKETED,
        shown="25; 1 for the first bucket",
        label="bucket {:g} MB".format,
    )
    bucket_view: bool | None = option(
        "Set DDP's gradient_as_bucket_view.",
        DDP,
        strategies=BUCKETED,
        label=lambda _: "bucket view",
    )
    static_graph: bool | None = option(
        "Set DDP's static_graph.", DDP, strategies=("ddp",), label=lambda _: "static graph"
    )
    find_unused: bool | None = option(
        "Set DDP's find_unused_parameters.",
        DDP,
        strategies=("ddp",),
        shown="on if a trial step finds unused parameters",
        label=lambda _: "find unused",
    )
    sync_every_pass: bool | None = option(
        "Synchronize gradients in every accumulation step, to see what that costs.",
        DDP,
        strategies=("ddp", "fsdp"),
        label=lambda _: "sync every pass",
    )
    compress: str | None = option(
        "Send gradients in fp16, in bf16, or as PowerSGD's low-rank matrices.",
        DDP,
        choices=COMPRESSIONS,
        strategies=COMPRESSED,
        shown="no compression",
        label="compress {}".format,
    )
    powersgd_rank: int | None = option(
        "PowerSGD: the rank of the matrices that it sends.",
        DDP,
        strategies=COMPRESSED,
        usual=1,
        label="rank {}".format,
    )
    steps: int | None = option("Optimizer steps to train.", LENGTH, shown="20")
    epochs: int | None = option(
        "Epochs to train; with --steps, training ends at whichever comes first.", LENGTH
    )
    device: str = option(
        "Train on GPUs or on CPU cores; auto uses GPUs if there are any.",
        DEVICES,
        default="auto",
        choices=("auto", "cpu", "cuda"),
    )
    backend: str | None = option(
        "How ranks move tensors: local uses memory that the ranks of one machine share.",
        DEVICES,
        choices=BACKENDS,
        strategies=BETWEEN_RANKS,
        shown="nccl for one GPU per rank; local for other ranks on one machine; otherwise gloo",
    )
    mps: bool | None = option(
        "Run NVIDIA's MPS daemon, so that ranks on one GPU compute at the same time.",
        DEVICES,
        strategies=BETWEEN_RANKS,
        label=lambda _: "MPS",
    )
    threads_per_device: int | None = option(
        "CPU threads per device.", DEVICES, shown="cores ÷ devices, at least 1"
    )
    prefix: str | None = option(
        "Start each rank with this command prefix, for example 'numactl -N {local_rank}'.",
        DEVICES,
        metavar="COMMAND",
    )


# Which strategies accept each option. Using it with any other strategy is an error.
APPLIES: Mapping[str, tuple[str, ...]] = {
    each.name: each.strategies for each in options_of(Request) if each.strategies
}


def only_applicable(request: Request) -> Request:
    """Remove the options that this strategy does not accept, because a comparison passes the same
    options to all strategies."""
    without: dict[str, Any] = {
        each.name: None for each in options_of(Request) if not each.applies_to(request.strategy)
    }
    return replace(request, **without)


def on_one_device(request: Request, batch_size: int) -> Request:
    """Return the configuration converted to `single`: one replica, stage, and accumulation step,
    without recomputation or compilation."""
    single = replace(request, strategy="single", accumulate=None, batch_size=batch_size)
    return only_applicable(replace(single, recompute=None, compile=None))


def count_shards(request: Request) -> int:
    """Return the number of shards of each split layer or sequence, or of the experts."""
    return request.shards or (2 if request.strategy in ("tp", "cp", "ep") else 1)


def has_shards(request: Request) -> bool:
    """Return whether multiple ranks share the work of one stage on the same samples."""
    return splits_layers(request) or splits_sequences(request)


def splits_layers(request: Request) -> bool:
    return request.strategy == "tp" or (request.strategy == "hybrid" and count_shards(request) > 1)


def splits_sequences(request: Request) -> bool:
    return request.strategy == "cp"


def splits_experts(request: Request) -> bool:
    return request.strategy in DIVIDED


def count_stages(request: Request) -> int:
    return (request.stages or 2) if request.strategy in STAGED else 1


def shards_stages(request: Request) -> bool:
    """Return whether FSDP shards the stages of a pipeline."""
    return request.zero in (2, 3) and count_stages(request) > 1


def has_process_per_cell(request: Request) -> bool:
    """Return whether each stage and shard of a replica has its own process."""
    return bool(request.schedule) or has_shards(request) or shards_stages(request)


def cells_per_replica(request: Request) -> int:
    """Return the number of processes per replica: stages × shards, or a single one."""
    cells = count_stages(request) * count_shards(request)
    return cells if has_process_per_cell(request) else 1


def with_schedule(request: Request) -> Request:
    """Choose a schedule if the user gave none and each stage needs its own process, because its
    layers are split or FSDP shards it. (FSDP works on one device and in one thread per process.)"""
    needs_process = splits_layers(request) or shards_stages(request)
    if request.schedule or not needs_process or count_stages(request) == 1:
        return request
    return replace(request, schedule="1f1b")


def uses_blocks(request: Request) -> bool:
    """Return whether the plan must know the model's repeated blocks."""
    return request.recompute is not None or bool(request.compile)


def in_fp64(request: Request) -> Request:
    """Return the same configuration in fp64, where rounding cannot hide a mistake."""
    return replace(request, precision="fp64", loss_scale=None, no_scaler=None)


def prefix_words(prefix: str, rank: int, local_rank: int) -> list[str]:
    """Split the prefix: `numactl -N {local_rank}` on local rank 1 -> numactl, -N, 1."""
    return [word.format(rank=rank, local_rank=local_rank) for word in shlex.split(prefix)]
