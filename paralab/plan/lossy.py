"""Lossy configurations, which train differently from a single device on purpose: compressed
gradients, and replicas that average their parameters only every few steps.

`verify` compares them with a simulation: the same algorithm on one device, one replica at a time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from paralab.errors import UsageError
from paralab.plan.request import AVERAGED, Request
from paralab.units import plural
from paralab.workload.summary import Summary

if TYPE_CHECKING:
    from paralab.plan.plan import Plan, Reasons

CASTS = ("fp16", "bf16")  # compressions that round each gradient
POWERSGD_START = 2  # skip PowerSGD in these steps, because DDP rebuilds its buckets
POWERSGD_STEPS = POWERSGD_START + 2  # the second compressed step includes the first one's error


@dataclass(frozen=True)
class Lossy:
    """The options that make a plan lossy: `compress` or `sync_every`.

    sync_every      number of steps between parameter averages; if None, gradients are averaged
    outer_lr, …     settings of DiLoCo's outer optimizer; 1 and 0 mean plain averaging
    """

    compress: str | None = None
    powersgd_rank: int = 1
    sync_every: int | None = None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.compress or self.sync_every)

    @property
    def has_outer_optimizer(self) -> bool:
        return (self.outer_lr, self.outer_momentum) != (1.0, 0.0)

    def synchronizes(self, step: int, num_steps: int) -> bool:
        """Return whether the replicas average their parameters after this step. They always do
        after the last step, so that all replicas finish with the same model."""
        assert self.sync_every
        return (step + 1) % self.sync_every == 0 or step + 1 == num_steps


@dataclass(frozen=True)
class Simulation(Lossy):
    """A lossy algorithm to simulate on one device, with its replicas and accumulation steps."""

    replicas: int = 1
    accumulate: int = 1


def is_lossy(request: Request) -> bool:
    return request.compress is not None or request.strategy in AVERAGED


def choose_lossy(request: Request, reasons: Reasons) -> Lossy:
    """Fill in the lossy options."""
    if request.compress:
        rank = request.powersgd_rank or 1
        of_rank = f", rank {rank}" if request.compress == "powersgd" else ""
        reasons.add("compress", request.compress + of_rank, "requested")
        return Lossy(request.compress, rank)
    if request.strategy not in AVERAGED:
        return Lossy()
    because = "averaging less often saves communication, but the replicas drift further apart"
    every = reasons.choose("synchronize every", request.sync_every, 10, because)
    lossy = Lossy(
        sync_every=every,
        outer_lr=1.0 if request.outer_lr is None else request.outer_lr,
        outer_momentum=request.outer_momentum or 0.0,
    )
    if lossy.has_outer_optimizer:
        outer = f"SGD with lr {lossy.outer_lr:g}, Nesterov momentum {lossy.outer_momentum:g}"
        reasons.add("outer optimizer", outer, "requested; it applies the average change (DiLoCo)")
    return lossy


def simulation_of(plan: Plan) -> Simulation | None:
    """Return what a single device must simulate to reproduce this plan, if the plan is lossy."""
    if not plan.lossy:
        return None
    return Simulation(**asdict(plan.lossy), replicas=plan.replicas, accumulate=plan.accumulate)


def rounds_in_any_order(plan: Plan) -> bool:
    """Return whether the backend adds rounded gradients in its own order, and rounds after each
    addition. `local` adds them in rank order and rounds once, which a simulation can repeat."""
    return plan.compress in CASTS and plan.backend != "local"


def describe_loss(lossy: Lossy) -> tuple[str, ...]:
    """Say why a lossy configuration trains differently from a single device."""
    if lossy.compress in CASTS:
        return (f"gradients are rounded to {lossy.compress} before and after they are added",)
    if lossy.compress:
        return ("PowerSGD sends gradients as low-rank matrices, and adds the rest later",)
    if lossy.sync_every:
        return (
            f"each replica takes {plural(lossy.sync_every, 'optimizer step')} on its own samples "
            "before the replicas average their parameters",
        )
    return ()


def provable(request: Request, num_steps: int) -> Request:
    """Return a configuration that runs every part of the algorithm in a few steps: a regular and a
    final average, or a step with PowerSGD's error feedback."""
    if request.compress == "powersgd" and num_steps < POWERSGD_STEPS:
        return replace(request, steps=POWERSGD_STEPS, epochs=None)
    if request.strategy not in AVERAGED:
        return request
    if num_steps < 2:
        request, num_steps = replace(request, steps=2, epochs=None), 2
    return replace(request, sync_every=min(request.sync_every or 10, num_steps - 1))


def check_lossy(request: Request) -> None:
    """Reject lossy options that cannot work or have no effect."""
    name = f"--compress {request.compress}" if request.compress else request.strategy
    if is_lossy(request) and request.replicas == 1:
        raise UsageError(
            f"{name} needs at least 2 replicas, because a single replica does not communicate.",
            fix="--replicas 2, or single",
        )
    if request.powersgd_rank and request.compress != "powersgd":
        raise UsageError(
            f"--powersgd-rank {request.powersgd_rank} needs --compress powersgd.",
            fix="--compress powersgd, or leave out --powersgd-rank",
        )
    momentum = request.outer_momentum
    if momentum is not None and not 0 <= momentum < 1:
        raise UsageError(
            f"--outer-momentum {momentum:g} must be at least 0 and less than 1.",
            fix="--outer-momentum 0.9",
        )
    if not request.compress:
        return

    if request.sync_every_pass:
        raise UsageError(
            f"{name} does not work with --sync-every-pass, which would reduce and compress the "
            "same gradient several times.",
            fix="leave out one of the two",
        )
    if request.compress == "powersgd" and request.precision == "fp16":
        raise UsageError(
            "--compress powersgd does not work with --precision fp16: PowerSGD adds what it did "
            "not send to the next step's gradient. By then, the GradScaler may have changed the "
            "scale, and an overflow would never go away.",
            fix="--precision bf16, or --compress fp16",
        )
    if request.compress in CASTS and request.compile:
        raise UsageError(
            f"{name} does not work with --compile: compiled code rounds the last bit differently, "
            f"which {request.compress} can amplify, so verify could not prove the training.",
            fix="leave out one of the two",
        )


def check_parameters(request: Request, summary: Summary) -> None:
    """Reject models whose parameters or gradients the algorithm does not support."""
    if is_lossy(request) and summary.imaginary:
        name = f"--compress {request.compress}" if request.compress else request.strategy
        raise UsageError(
            f"{name} does not support complex numbers, such as {summary.imaginary[0]!r} in "
            f"{summary.name}.",
            fix="ddp, which adds them exactly",
        )
    if request.compress == "powersgd" and summary.scalars:
        raise UsageError(
            f"--compress powersgd needs tensors with at least one dim, but {summary.scalars[0]!r} "
            f"in {summary.name} is a scalar.",
            fix=f"give {summary.scalars[0]!r} the shape (1,), or --compress bf16",
        )
