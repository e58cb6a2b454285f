"""Reject configurations that cannot run with this model, or would train it incorrectly."""

from __future__ import annotations

import re

from paralab.errors import UsageError
from paralab.machine.host import Machine
from paralab.plan.lossy import check_parameters
from paralab.plan.request import (
    Request,
    has_shards,
    shards_stages,
    splits_experts,
    splits_layers,
    splits_sequences,
    with_schedule,
)
from paralab.workload.summary import Summary

UNGATHERED = "dp cannot gather the outputs of its replicas"
FSDP_TORCH = (2, 10)  # the first version with custom collectives and summed gradients on gloo


def check_model(request: Request, machine: Machine, summary: Summary) -> None:
    """Reject a model or an optimizer that the strategy would train incorrectly or not at all."""
    request = with_schedule(request)
    zero = request.zero or (3 if request.strategy == "fsdp" else None)
    divides = zero in (2, 3) or splits_layers(request) or splits_experts(request)

    check_parameters(request, summary)
    _check_kinds(request, summary, zero)
    _check_optimizer(request, summary, zero)
    _check_access(request, summary, divides, no_gpu=not machine.gpus)
    if summary.inner_backward and zero in (2, 3):
        raise UsageError(
            f"{request.strategy} frees the parameters of each unit after a backward pass, but "
            f"{summary.name} runs one (torch.autograd.grad) before its loss is known.",
            fix="--zero 1 with fsdp, or ddp",
        )
    if divides or has_shards(request):
        _require_torch(request.strategy, machine)


def _check_kinds(request: Request, summary: Summary, zero: int | None) -> None:
    """Reject kinds of parameters, gradients, and outputs that the strategy cannot handle."""
    strategy = request.strategy
    if summary.sparse and (strategy not in ("single", "ddp") or request.compress):
        compress = f" --compress {request.compress}" if request.compress else ""
        raise UsageError(
            f"{strategy}{compress} cannot train with sparse gradients, "
            f"but {summary.sparse[0]!r} in {summary.name} has a sparse gradient.",
            fix="nn.Embedding(…, sparse=False), or use single or ddp",
        )
    if summary.unbatched and strategy == "dp":
        raise UsageError(
            f"dp cannot train {summary.name}: its model returns a tensor without a sample dim (such "
            "as a loss or a parameter), and DataParallel would return one per replica.",
            fix="return one value per sample and compute the loss in `loss`, or use ddp",
        )
    if len(dtypes := _dtypes(request, summary)) > 1 and zero == 1:
        raise UsageError(
            f"--zero 1 needs parameters of one dtype, but those of {summary.name} have "
            f"{' and '.join(dtypes)}.",
            fix="--zero 2, or ddp",
        )
    if summary.scalars and zero in (2, 3):
        name = summary.scalars[0]
        raise UsageError(
            f"fsdp cannot shard the parameter {name!r} of {summary.name}: it is a scalar.",
            fix=f"give {name!r} the shape (1,), or use ddp",
        )


def _check_optimizer(request: Request, summary: Summary, zero: int | None) -> None:
    """Reject optimizers that need full parameters or all parameters, if no rank has them."""
    if summary.whole_tensors and zero in (2, 3):
        raise UsageError(
            f"{request.strategy} gives each rank a shard of every parameter, but "
            f"{summary.optimizer} needs full parameters.",
            fix="--zero 1 with fsdp, an elementwise optimizer such as AdamW or SGD, or use ddp",
        )
    if summary.whole_model and zero == 1:
        raise UsageError(
            f"--zero 1 gives each rank an optimizer for some of the parameters, but "
            f"{summary.optimizer} needs all parameters at once, for example to clip a global norm.",
            fix="ddp, or an optimizer that updates each parameter on its own",
        )
    if summary.whole_model and zero in (2, 3) and splits_layers(request):
        raise UsageError(
            f"{summary.optimizer} needs all parameters at once, for example to clip a global norm, "
            f"but with --zero {zero} and --shards, torch cannot combine the two kinds of "
            "parameters.",
            fix="leave out --zero or --shards",
        )
    without_schedule = "--stages 1" if splits_layers(request) else "leave out --schedule"
    without_schedule += " and --zero" if shards_stages(request) else ""
    if summary.whole_model and request.schedule:
        raise UsageError(
            f"--schedule {request.schedule} gives each stage its own optimizer, but "
            f"{summary.optimizer} needs all parameters at once, for example to clip a global norm.",
            fix=f"{without_schedule}, so that one optimizer has all parameters",
        )
    if summary.by_position and request.schedule:
        raise UsageError(
            f"--schedule {request.schedule} gives each stage its own optimizer, but the optimizer of "
            f"{summary.name} chooses parameters by their position in the whole model.",
            fix=f"choose them by their shape or their id, or {without_schedule}",
        )


def _check_access(request: Request, summary: Summary, divides: bool, *, no_gpu: bool) -> None:
    """Reject a loss or a hook that needs a whole parameter or a whole gradient."""
    strategy = request.strategy
    if summary.read_by_loss and (divides or request.schedule):
        raise UsageError(
            f"The loss of {summary.name} reads the parameter {summary.read_by_loss[0]!r} itself, but "
            f"with {strategy} no rank has all parameters.",
            fix="return what the loss needs from the model's forward, use weight decay, or use ddp",
        )
    copies = strategy == "dp" and no_gpu
    if summary.hooked and (divides or copies):
        raise UsageError(
            f"{strategy} replaces parameters with {'copies' if copies else 'shards'}, which do not "
            f"have the gradient hook of {summary.hooked[0]!r} in {summary.name}.",
            fix="change gradients in the optimizer's step, or use ddp",
        )
    if summary.hooked and splits_sequences(request):
        raise UsageError(
            f"cp computes a part of each gradient on each rank, so the gradient hook of "
            f"{summary.hooked[0]!r} in {summary.name} would see only that part.",
            fix="change gradients in the optimizer's step, or use ddp",
        )


def _dtypes(request: Request, summary: Summary) -> list[str]:
    """Return the parameters' dtypes in training. In fp64, there is at most one real and one complex
    dtype."""
    if request.precision == "fp64":
        return sorted({"complex128" if "complex" in each else "float64" for each in summary.dtypes})
    return list(summary.dtypes)


def _require_torch(strategy: str, machine: Machine) -> None:
    version = tuple(int(number) for number in re.findall(r"\d+", machine.torch)[:2])
    if version < FSDP_TORCH:
        needed = ".".join(map(str, FSDP_TORCH))
        raise UsageError(
            f"{strategy} needs PyTorch {needed} or newer, but this is {machine.torch}.",
            fix=f"pip install 'torch>={needed}', or use ddp",
        )
