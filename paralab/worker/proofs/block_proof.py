"""Prove on real ranks that a sharded block computes what the plain block computes.

Both run on the recorded arguments in fp64, forward and backward. All outputs, all gradients of the
inputs, and all gradients of the parameters must match on every rank. A parameter that is not
sharded must have the same full gradient on all ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sharding.sharded_layers import shard_group
from paralab.worker.sharding.shards import whole
from paralab.workload.batch import tensors
from paralab.workload.linear_layers import Call
from paralab.workload.randomness import seed_everything
from paralab.workload.state import State, changes, copy_of, restored, state_of
from paralab.workload.tensor_group import TensorGroup

TOLERANCE = 1e-10  # relative to the largest value
Values = dict[str, torch.Tensor]
Context = Callable[[], AbstractContextManager[None]]


class Sharded(NamedTuple):
    """How to train a sharded module.

    training  makes the context for its forward and backward passes
    draw      lets each shard draw its own random numbers where activations are split
    own       returns a batch's samples for this rank, and their share of the loss
    total     returns the loss of all ranks
    """

    training: Context = nullcontext
    draw: Callable[[ShardStreams], None] = lambda streams: None
    own: Callable[[Any], tuple[Any, float]] = lambda batch: (batch, 1.0)
    total: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss


WHOLE = Sharded()  # not sharded
Shard = Callable[[nn.Module], Sharded]  # shards a module in place


def perturb(model: nn.Module) -> None:
    """Add noise to the parameters. Many models initialize parameters to zero or one, which can
    hide mistakes: a zero matrix gives zeros no matter how it is split."""
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                scale = 0.5 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.1
                noise = torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
                parameter.add_(scale * noise.to(parameter))


class AnotherRankFailedError(RuntimeError):
    """Another rank failed between two collectives, and all ranks know about it."""


def run_block(block: nn.Module, calls: Sequence[Call], training: Context = nullcontext) -> Values:
    """Call the block, and back-propagate a fixed combination of its outputs. Return the outputs,
    gradients, and changed buffers. If this changes the block's state, repeat it, because the state
    may affect the next outputs. Then restore the state."""
    with restored(block) as before:
        values = _run_calls(block, calls, training)
        if not changes(before, state_of(block)):
            return values
        next_step = _run_calls(block, calls, training)
        again = {f"{name} in the next step": value for name, value in next_step.items()}
        return values | again | changed_buffers(block, before)


def changed_buffers(model: nn.Module, before: State) -> Values:
    """Return the buffers that have changed since the state `before`."""
    changed = set(changes(before, state_of(model)))
    return {f"buffer {n}": b.clone() for n, b in model.named_buffers() if n in changed}


def _run_calls(block: nn.Module, calls: Sequence[Call], training: Context) -> Values:
    block.zero_grad(set_to_none=True)
    with training():
        values = _run(block, calls)
    return values | gradients_of(block)


def _run(block: nn.Module, calls: Sequence[Call]) -> Values:
    values: Values = {}
    for number, call in enumerate(calls):
        args, kwargs = copy.deepcopy(call.arguments)
        for tensor, trained in zip(tensors((args, kwargs)), call.trained, strict=True):
            tensor.requires_grad_(trained)
        seed_everything(0)
        outputs = list(tensors(block(*args, **kwargs)))
        sums = [_combine(output) for output in outputs if output.requires_grad]
        if not sums:
            raise RuntimeError("its output does not depend on a parameter")
        torch.stack(sums).sum().backward()
        values |= {f"output {number}.{n}": t.detach() for n, t in enumerate(outputs)}
        grads = [t.grad for t in tensors((args, kwargs)) if t.grad is not None]
        values |= {f"gradient of input {number}.{n}": grad for n, grad in enumerate(grads)}
    return values


def _combine(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the elements with different weights, so that each has a different gradient."""
    parts = _real(tensor)
    return (parts * torch.arange(parts.numel()).cos().view(parts.shape)).sum()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts of a complex tensor. Return real tensors unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def gradients_of(model: nn.Module) -> Values:
    return {
        f"gradient of {name}": whole(p.grad)
        .to_dense()
        .clone()  # an optimizer may clip gradients in place
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def errors_of(mine: Values, reference: Values) -> dict[str, float]:
    """Return each value's largest difference, relative to the largest value of the same kind (the
    first word of the name). Do not divide by the value itself: a gradient that cancels to zero
    (such as that of a key's bias) consists only of rounding errors."""
    largest: dict[str, float] = {}
    for name, value in reference.items():
        kind = name.partition(" ")[0]
        largest[kind] = max(largest.get(kind, 0.0), _largest(value))

    errors = dict.fromkeys(mine.keys() ^ reference.keys(), math.inf)
    for name in mine.keys() & reference.keys():
        if mine[name].shape == reference[name].shape:
            scale = largest[name.partition(" ")[0]] or 1.0
            errors[name] = _largest(mine[name], reference[name]) / scale
        else:
            errors[name] = math.inf
    return errors


def _largest(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    """Return the largest absolute value in the tensor, or in its difference from another tensor."""
    values = _real(tensor).double()
    values = values if other is None else values - _real(other).double()
    return float(values.abs().max()) if values.numel() else 0.0


def without_gradient(group: TensorGroup, reference: Values) -> str | None:
    """Return a layer of the group whose gradient is zero in the plain block, if any. Comparing
    zeros would prove nothing."""
    prefix = f"{group.block}." if group.block else ""
    for layer in group.layers:
        weight = "in_proj_weight" if group.is_attention else "weight"
        gradient = reference.get(f"gradient of {layer.removeprefix(prefix)}.{weight}")
        if gradient is None or not _largest(gradient):
            return layer
    return None


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def agree_on(problem: str | None) -> str | None:
    """Return a problem if any rank has one. Prefer this rank's problem."""
    anywhere = torch.tensor(int(problem is not None))
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    if not anywhere:
        return None
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return problem or next(each for each in problems if each)


def begin_together(*_: Any, **__: Any) -> Callable[[], None]:
    """Call this before a collective in a proof. If another rank has failed since the previous
    collective, it is waiting in `agree_on`, so raise an error instead of waiting for that rank."""
    if problem := agree_on(None):
        raise AnotherRankFailedError(problem)
    return lambda: None


def worst_of(errors: dict[str, float]) -> str | None:
    """Describe the largest error, if it is NaN or above the tolerance."""
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    if not wrong:
        return None
    name = max(wrong, key=lambda name: (not math.isfinite(wrong[name]), wrong[name]))
    if math.isfinite(wrong[name]):
        return f"the {name} differs by {wrong[name]:.2g}"
    return f"the {name} has a different shape, is missing, or is not finite"


def prove(
    plain: nn.Module,
    calls: Sequence[Call],
    reference: Values,
    group: TensorGroup,
    mesh: DeviceMesh,
) -> TensorGroup:
    """Shard a copy of the block, and compare it with the plain block's values (`reference`).

    A parameter that is not split but lies between the columns and the row (such as the norm of each
    head's query) gets gradients only from this shard's heads. If nothing else differs, sum them
    over shards."""
    tried, errors = _try(plain, calls, reference, group, mesh)
    prefix = f"{group.block}." if group.block else ""
    names = [f"{prefix}{name}" for name, _ in plain.named_parameters()]
    whole = [name for name in names if not name.startswith(tuple(f"{n}." for n in group.layers))]
    keys = {f"gradient of {name.removeprefix(prefix)}": name for name in whole}

    wrong = {key for key, error in errors.items() if not error <= TOLERANCE}
    flags = torch.tensor([int(key in wrong) for key in keys] + [int(bool(wrong - keys.keys()))])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    *partial, other = flags.tolist()
    if tried.kept or other or not any(partial):
        return tried
    summed = tuple(name for name, flag in zip(whole, partial, strict=True) if flag)
    again, _ = _try(plain, calls, reference, replace(group, summed=summed), mesh)
    return again if again.kept else tried


def _try(
    plain: nn.Module,
    calls: Sequence[Call],
    reference: Values,
    group: TensorGroup,
    mesh: DeviceMesh,
) -> tuple[TensorGroup, dict[str, float]]:
    """Return the group with the result of the proof, and this rank's errors."""

    def shard(block: nn.Module) -> Sharded:
        shard_group(block, group, mesh, group.block)
        return Sharded()

    problem, errors = compare(plain, calls, reference, shard)
    error = largest_of(errors)
    return replace(group, kept=problem is None, error=error, reason=problem or ""), errors


def compare(
    plain: nn.Module, calls: Sequence[Call], reference: Values, shard: Shard
) -> tuple[str | None, dict[str, float]]:
    """Shard a copy of the block, and compare it with the plain block's values (`reference`). Return
    a problem if any rank has one, and this rank's errors."""
    block = copy_of(plain)
    try:
        errors = errors_of(run_block(block, calls, shard(block).training), reference)
        problem = worst_of(errors)
    except AnotherRankFailedError as failed:
        return str(failed), {"": math.inf}
    except Exception as raised:
        problem, errors = first_line(raised), {"": math.inf}
    return agree_on(problem), errors


def largest_of(errors: dict[str, float]) -> float | None:
    largest = max(errors.values())
    return largest if math.isfinite(largest) else None
