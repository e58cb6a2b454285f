"""What the user asked for: one field per option; None means "not said"."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from paralab.errors import UsageError, unknown
from paralab.plan.schedules import SCHEDULES

STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "single": "one device, the baseline that every other strategy is compared with",
        "dp": "DataParallel: one process, the batch split over replicas of the model, gradients gathered on device 0",
        "ddp": "DistributedDataParallel: one process per replica, gradients all-reduced during the backward pass",
        "fsdp": "FSDP2: one process per replica, each keeps a shard of every parameter, gradient and optimizer state",
        "mp": "model parallelism: one process, the layers spread over devices, one device at work at a time",
        "pipeline": "model parallelism with micro-batches, so that the devices work at the same time",
        "hybrid": "ddp over replicas, each of them a pipeline over its own devices",
    }
)
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")

# Which options mean something for which strategy; asking for the others is an error, not silently
# ignored.
APPLIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "replicas": ("dp", "ddp", "fsdp", "hybrid"),
        "stages": ("mp", "pipeline", "hybrid"),
        "micro_batches": ("pipeline", "hybrid"),
        "schedule": ("pipeline", "hybrid"),
        "bucket_mb": ("ddp", "hybrid"),
        "bucket_view": ("ddp", "hybrid"),
        "static_graph": ("ddp",),
        "find_unused": ("ddp",),
        "sync_every_pass": ("ddp", "fsdp"),
        "placement": ("mp", "pipeline", "hybrid"),
    }
)


@dataclass(frozen=True)
class Request:
    strategy: str
    workload: str = "mlp"
    replicas: int | None = None
    stages: int | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    micro_batches: int | None = None
    precision: str | None = None
    loss_scale: float | None = None
    no_scaler: bool | None = None
    bucket_mb: float | None = None
    bucket_view: bool | None = None
    static_graph: bool | None = None
    find_unused: bool | None = None
    sync_every_pass: bool | None = None
    steps: int | None = None
    epochs: int | None = None
    samples: int | None = None
    seed: int = 0
    device: str = "auto"
    placement: str | None = None
    threads_per_device: int | None = None
    prefix: str | None = None
    schedule: str | None = None


def check(request: Request) -> None:
    """Refuse what is wrong whatever the machine and the model are."""
    if request.strategy not in STRATEGIES:
        raise unknown("strategy", request.strategy, STRATEGIES)
    for option, strategies in APPLIES.items():
        if getattr(request, option) is not None and request.strategy not in strategies:
            flag = flag_of(option)
            value = "" if getattr(request, option) is True else f" {getattr(request, option)}"
            raise UsageError(
                f"{flag}{value} means nothing for {request.strategy}.",
                fix=f"leave {flag} out, or use one of: {', '.join(strategies)}",
            )
    _check_choice("precision", request.precision, PRECISIONS)
    _check_choice("device", request.device, ("auto", "cpu", "cuda"))
    _check_choice("placement", request.placement, ("spread", "same"))
    _check_choice("schedule", request.schedule, SCHEDULES)
    _check_schedule(request)
    for field in fields(request):
        value = getattr(request, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or field.name == "seed":
            continue
        if value <= 0 or not math.isfinite(value):
            flag = flag_of(field.name)
            raise UsageError(f"{flag} {value} is not a positive number.", fix=f"{flag} 1 or more")
    if not 0 <= request.seed < 2**32:
        raise UsageError(f"--seed {request.seed} is not between 0 and {2**32 - 1}.", fix="--seed 0")
    if request.loss_scale is not None and request.precision != "fp16":
        raise UsageError(
            f"--loss-scale {request.loss_scale:g} needs fp16: only fp16 is trained with a GradScaler.",
            fix="--precision fp16, or leave --loss-scale out",
        )
    if request.no_scaler and (request.precision != "fp16" or request.loss_scale is not None):
        problem = (
            "needs fp16"
            if request.precision != "fp16"
            else f"contradicts --loss-scale {request.loss_scale:g}"
        )
        raise UsageError(
            f"--no-scaler {problem}: it trains fp16 without a GradScaler.",
            fix="--precision fp16 --no-scaler",
        )
    if request.sync_every_pass and (request.accumulate or 1) < 2:
        raise UsageError(
            "--sync-every-pass needs more than one backward pass per step.",
            fix="--accumulate 4 --sync-every-pass",
        )
    if request.static_graph and request.sync_every_pass is None and (request.accumulate or 1) > 1:
        raise UsageError(
            f"--static-graph with --accumulate {request.accumulate}: DDP learns the graph from its first backward pass, and that "
            "one is not synchronized.",
            fix="leave one of them out",
        )
    if request.prefix is not None:
        try:
            first = prefix_words(request.prefix, 0, 0)[0]
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(
                f"--prefix {request.prefix!r} cannot be filled in: {error}.",
                fix="{rank} and {local_rank} are known",
            ) from error
        if not shutil.which(first):
            raise UsageError(
                f"--prefix {request.prefix!r}: there is no command {first!r}.",
                fix="a command of this machine",
            )


def _check_schedule(request: Request) -> None:
    if request.schedule and request.placement == "same":
        raise UsageError(
            f"--schedule {request.schedule} has a process and a device for every stage; --placement same would put them on one.",
            fix="leave one of them out",
        )
    if request.schedule and request.bucket_view:
        raise UsageError(
            f"--bucket-view is an option of DDP, and --schedule {request.schedule} adds the gradients up without it.",
            fix="leave one of them out",
        )


def only_applicable(request: Request) -> Request:
    """Leave out what means nothing for this strategy, where one set of options is given to
    several."""
    without: dict[str, Any] = {
        name: None for name, strategies in APPLIES.items() if request.strategy not in strategies
    }
    return replace(request, **without)


def on_one_device(request: Request, batch_size: int) -> Request:
    """The same training as `single`: one replica, one stage, one pass. What every strategy is
    compared with."""
    return only_applicable(
        replace(request, strategy="single", accumulate=None, batch_size=batch_size)
    )


def options_of(request: Request) -> list[str]:
    """The words that a request is written with after `paralab run STRATEGY`: what was said, in the
    order of the options."""
    words: list[str] = []
    for name, value in asdict(request).items():
        if (
            name == "strategy"
            or value is None
            or (name, value) in (("seed", 0), ("device", "auto"))
        ):
            continue
        if isinstance(value, float):
            value = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        words += [flag_of(name)] if value is True else [flag_of(name), str(value)]
    return words


def flag_of(option: str) -> str:
    """`batch_size` -> `--batch-size`."""
    return "--" + option.replace("_", "-")


def prefix_words(prefix: str, rank: int, local_rank: int) -> list[str]:
    """`numactl -N {local_rank}` for local rank 1 -> ["numactl", "-N", "1"]."""
    return [word.format(rank=rank, local_rank=local_rank) for word in shlex.split(prefix)]


def _check_choice(option: str, given: str | None, known: tuple[str, ...]) -> None:
    if given is not None and given not in known:
        raise unknown(f"--{option}", given, known)
