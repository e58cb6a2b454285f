"""The training precision, and whether this machine supports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paralab.errors import UsageError
from paralab.machine.host import Gpu, Machine
from paralab.machine.precision import Probe
from paralab.plan.plan import Reasons
from paralab.plan.request import Request

LOW_PRECISIONS = ("tf32", "bf16", "fp16")  # these precisions round every product
AMPERE = (8, 0)  # the first compute capability with tf32 and bf16
LOSS_SCALE = 65536.0  # torch's default


@dataclass(frozen=True)
class Precision:
    """The numeric format, whether to use a GradScaler, and the required environment variables."""

    precision: str
    scaler: bool = False
    loss_scale: float | None = None
    environment: dict[str, str] = field(default_factory=dict)


def too_old(precision: str, machine: Machine) -> list[Gpu]:
    """Return the GPUs that do not support this precision."""
    needs_ampere = precision in ("tf32", "bf16")
    return [gpu for gpu in machine.gpus if needs_ampere and gpu.capability < AMPERE]


def choose_precision(
    request: Request,
    machine: Machine,
    device: str,
    probe: Callable[[str], Probe],
    reasons: Reasons,
) -> Precision:
    """Choose the precision. On a CPU, a child process tries low precision first, because a missing
    instruction kills the process."""
    precision = request.precision or "fp32"
    environment: dict[str, str] = {}

    if device == "cuda" and (weak := too_old(precision, machine)):
        capability = ".".join(map(str, weak[0].capability))
        raise UsageError(
            f"--precision {precision} needs a GPU with compute capability 8.0 or higher, but "
            f"{weak[0].name} has {capability}.",
            fix="--precision fp16 or fp32",
        )
    if device == "cpu" and precision == "tf32":
        raise UsageError(
            "--precision tf32 exists only on NVIDIA GPUs, but this run uses the CPU.",
            fix="--precision fp32 or bf16",
        )
    if device == "cpu" and precision in ("bf16", "fp16"):
        tried = probe(precision)
        if not tried.works:
            raise UsageError(
                f"--precision {precision} does not work on this CPU: {tried.reason}.",
                fix="--precision fp32",
            )
        environment = tried.environment
        reasons.add("precision", precision, f"requested; {tried.reason}")
    else:
        reasons.choose("precision", request.precision, "fp32", "PyTorch's default")

    scaler = precision == "fp16" and not request.no_scaler
    loss_scale = request.loss_scale or (LOSS_SCALE if scaler else None)
    return Precision(precision, scaler, loss_scale, environment)
