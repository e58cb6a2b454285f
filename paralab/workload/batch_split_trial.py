"""Check whether a batch can be split at all.

Splitting works only if the batch's loss is the weighted mean of its parts' losses, and no sample's
output depends on the rest of the batch. Otherwise, training with split batches gives a
different model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from paralab.workload.batch import call_model, copied, num_samples, take, tensors, unpack
from paralab.workload.fp64 import batch_in_fp64, loss_in_fp64, model_in_fp64
from paralab.workload.hooks import watched
from paralab.workload.randomness import seed_everything
from paralab.workload.sample_draws import seeded_loss
from paralab.workload.state import put_back, state_of
from paralab.workload.verify_controls import casts_in_vain, controlled
from paralab.workload.workload import Workload

MOST_SINGLES = 16  # the largest number of samples to run one at a time
Outputs = dict[str, list[torch.Tensor]]  # maker -> inputs or outputs of submodules


def find_split_problem(
    workload: Workload, model: nn.Module, batch: Any, kinds: tuple[str, ...]
) -> str | None:
    """Return why a batch cannot be split, or None if it can.

    Compare the full batch with its halves, with a third and the rest, and with single samples, on
    one device in fp64. This changes the model's dtype."""
    workload = replace(workload, loss=loss_in_fp64(workload.loss))
    with _in_fp64(model, batch) as batch:
        example = (workload.unpack or unpack)(take(batch, 0, 3))[0]
        if "random" in kinds:
            workload = replace(workload, loss=seeded_loss(workload.loss))
        samples = num_samples((workload.unpack or unpack)(batch)[0])
        if samples < 4:
            return None

        singles = range(1, min(samples - 1, MOST_SINGLES) + 1)
        with controlled(model, kinds, example):
            whole = _run(workload, model, batch)
            for cuts in ([samples // 2], [max(1, samples // 3)], list(singles)):
                if problem := _compare(workload, model, batch, whole, [0, *cuts, samples]):
                    return problem
        return None


def find_casts(workload: Workload, model: nn.Module, batch: Any) -> bool:
    """Return whether verification should ignore the model's casts to fp32. This changes the model's
    dtype."""
    workload = replace(workload, loss=loss_in_fp64(workload.loss))
    with _in_fp64(model, batch) as batch:
        before = state_of(model)
        has_casts = casts_in_vain(lambda: _run(workload, model, take(batch, 0, 2)))
        put_back(model, before)
    return has_casts


@contextmanager
def _in_fp64(model: nn.Module, batch: Any) -> Iterator[Any]:
    """Convert the model, and yield the converted batch."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model_in_fp64(model)
        yield batch_in_fp64(batch)
    finally:
        torch.set_default_dtype(before)


def _compare(
    workload: Workload,
    model: nn.Module,
    batch: Any,
    whole: tuple[float, Outputs],
    edges: list[int],
) -> str | None:
    """Compare the full batch with its parts between these edges."""
    parts = [take(batch, *edge) for edge in pairwise(edges)]
    try:
        results = [_run(workload, model, part) for part in parts]
    except Exception:  # a model that rejects a single sample also raises on a rank
        return None
    sizes = [stop - start for start, stop in pairwise(edges)]
    weigh = workload.weight or num_samples
    weights = [float(weigh(part)) for part in parts]
    return _find_mixing(whole[1], [outputs for _, outputs in results], sizes) or _check_mean(
        whole[0], [loss for loss, _ in results], weights, workload.weight is not None
    )


def _run(workload: Workload, model: nn.Module, batch: Any) -> tuple[float, Outputs]:
    """Return the loss, and the submodules' inputs and outputs in the order of computation."""
    outputs: Outputs = {}
    inputs, targets = (workload.unpack or unpack)(copied(batch))
    seed_everything(0)

    def save(maker: str, made: Any) -> None:
        copies = (t.detach().clone() for t in tensors(made) if t.is_floating_point())
        outputs.setdefault(maker, []).extend(copies)

    with watched(
        model,
        lambda name, arguments: save(f"something before {name!r}", arguments),
        lambda name, output: save(repr(name), output),
    ):
        output = call_model(model, inputs)
    save("the model", output)
    return float(workload.loss(output, targets)), outputs


def _check_mean(
    whole: float, losses: list[float], weights: list[float], weighted: bool
) -> str | None:
    """Return why the batch's loss is not the weighted mean of its parts' losses, or None."""
    # Ignore parts with weight zero, because a mean over no samples is NaN.
    counting = [(loss, w) for loss, w in zip(losses, weights, strict=True) if w]
    losses, total = [loss for loss, _ in counting], sum(weights) or 1.0
    mean = sum(loss * weight for loss, weight in counting) / total
    size = max(abs(whole), *map(abs, losses), 1e-30)
    if abs(whole - mean) <= 1e-9 * size or not all(map(math.isfinite, [whole, *losses])):
        return None

    over = "the units that `weight` counts" if weighted else "the samples"
    listed = f"{losses[0]:.6g} and {losses[1]:.6g}" if len(losses) == 2 else f"{losses[0]:.6g}, …"
    squares = sum(loss**2 * weight for loss, weight in counting) / total
    kind, hint = f"not a mean over {over}", ""
    if abs(whole - sum(losses)) <= 1e-9 * size:
        kind = f"a sum over {over}, not a mean"
    elif abs(whole**2 - squares) <= 1e-9 * size**2:
        kind = f"the square root of a mean over {over}"
    elif len(losses) == 2 and min(losses) < whole < max(losses):
        needed, given = (whole - losses[1]) / (losses[0] - losses[1]), counting[0][1] / total
        hint = (
            f". It would be a mean if the weight of the first part were {needed:.1%} instead of "
            f"{given:.1%}. If the loss has class weights or ignored targets, give the workload a "
            "`weight`"
        )
    return (
        f"the loss is {kind}: the loss of one batch is {whole:.6g}, but its {len(losses)} parts "
        f"have losses {listed}, with a mean of {mean:.6g}{hint}"
    )


def _find_mixing(whole: Outputs, parts: list[Outputs], sizes: list[int]) -> str | None:
    """Find the first submodule whose output for a sample depends on the rest of the batch."""
    for maker, outputs in whole.items():
        same_calls = [part[maker] for part in parts if len(part.get(maker, [])) == len(outputs)]
        if len(same_calls) < len(sizes):
            continue
        for number, tensor in enumerate(outputs):
            pieces = [part[number] for part in same_calls]
            per_sample = tensor.ndim and len(tensor) == sum(sizes) and tensor.numel()
            shapes = [(size, *tensor.shape[1:]) for size in sizes]
            if not per_sample or [tuple(piece.shape) for piece in pieces] != shapes:
                continue
            worst = float((torch.cat(pieces) - tensor).abs().max())
            if worst > 1e-9 * max(float(tensor.abs().max()), 1e-30):
                return (
                    f"{maker} mixes the samples of a batch: the result for one sample changes by "
                    f"{worst:.2g} if the batch does not contain the others"
                )
    return None
