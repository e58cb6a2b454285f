"""What the user asked for: one field per option; None means "not said"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from paralab.errors import UsageError, unknown

STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "single": "one device, the baseline that every other strategy is compared with",
        "dp": "DataParallel: one process, the batch split over replicas of the model, gradients gathered on device 0",
        "ddp": "DistributedDataParallel: one process per replica, gradients all-reduced during the backward pass",
        "mp": "model parallelism: one process, the layers spread over devices, one device at work at a time",
        "pipeline": "model parallelism with micro-batches, so that the devices work at the same time",
        "hybrid": "ddp over replicas, each of them a pipeline over its own devices",
    }
)
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")

# Which options mean something for which strategy; asking for the others is an error, not silently ignored.
APPLIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "replicas": ("dp", "ddp", "hybrid"),
        "stages": ("mp", "pipeline", "hybrid"),
        "micro_batches": ("pipeline", "hybrid"),
        "bucket_mb": ("ddp", "hybrid"),
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
    bucket_mb: float | None = None
    steps: int | None = None
    epochs: int | None = None
    samples: int | None = None
    seed: int = 0
    device: str = "auto"
    placement: str | None = None
    threads_per_device: int | None = None


def check(request: Request) -> None:
    """Refuse what is wrong whatever the machine and the model are."""
    if request.strategy not in STRATEGIES:
        raise unknown("strategy", request.strategy, STRATEGIES)
    for option, strategies in APPLIES.items():
        if getattr(request, option) is not None and request.strategy not in strategies:
            flag = "--" + option.replace("_", "-")
            raise UsageError(
                f"{flag} {getattr(request, option)} means nothing for {request.strategy}.",
                cure=f"leave {flag} out, or use one of: {', '.join(strategies)}",
            )
    _check_choice("precision", request.precision, PRECISIONS)
    _check_choice("device", request.device, ("auto", "cpu", "cuda"))
    _check_choice("placement", request.placement, ("spread", "same"))
    for field in fields(request):
        value = getattr(request, field.name)
        if isinstance(value, int | float) and field.name != "seed" and value <= 0:
            flag = "--" + field.name.replace("_", "-")
            raise UsageError(f"{flag} {value} is not a positive number.", cure=f"{flag} 1 or more")
    if not 0 <= request.seed < 2**32:
        raise UsageError(f"--seed {request.seed} is not between 0 and {2**32 - 1}.", cure="--seed 0")
    if request.loss_scale is not None and request.precision != "fp16":
        raise UsageError(
            f"--loss-scale {request.loss_scale:g} needs fp16: only fp16 is trained with a GradScaler.",
            cure="--precision fp16, or leave --loss-scale out",
        )


def _check_choice(option: str, given: str | None, known: tuple[str, ...]) -> None:
    if given is not None and given not in known:
        raise unknown(f"--{option}", given, known)
