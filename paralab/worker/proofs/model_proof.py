"""Prove on real ranks that a sharded model trains like the plain model: the loss, all gradients,
buffers, and one optimizer step. Then check that the ranks agree with dropout on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paralab.worker.optimizer import make_optimizer
from paralab.worker.proofs.block_proof import (
    WHOLE,
    AnotherRankFailedError,
    Shard,
    Sharded,
    Values,
    agree_on,
    changed_buffers,
    errors_of,
    first_line,
    gradients_of,
    worst_of,
)
from paralab.worker.proofs.proof_model import find_other_branches
from paralab.worker.rank_context import weighted_loss
from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sharding.sharded_layers import mixing_tensors
from paralab.worker.sharding.shards import whole
from paralab.workload.batch import call_model, copied, unpack
from paralab.workload.randomness import seed_everything
from paralab.workload.state import copy_of, restored
from paralab.workload.verify_controls import controlled, without_casts
from paralab.workload.workload import Workload


def prove_together(
    workload: Workload,
    model: nn.Module,
    batch: Any,
    shard: Shard,
    kinds: Sequence[str],
) -> str | None:
    """Shard the whole model. Return a problem, or None if it trains like the plain model. `kinds`
    lists what `controlled` holds fixed."""

    def all_samples() -> Iterator[Any]:
        yield batch
        with controlled(model, kinds):  # this is slow, so only if the batch itself is equal
            branches = find_other_branches(workload, model, batch)
        yield from branches

    sharded = copy_of(model)
    how = WHOLE
    for number, samples in enumerate(all_samples()):
        try:
            if not number:
                how = shard(sharded)
            with controlled(model, kinds):
                reference = _train_step(workload, model, samples)
            with controlled(sharded, kinds):
                mine = _train_step(workload, sharded, samples, how)
            problem = _describe(errors_of(mine, reference))
        except AnotherRankFailedError as failed:
            return str(failed)
        except Exception as error:
            problem = first_line(error)
        if problem := agree_on(problem):
            where = "for a sample that takes another branch" if number else "in the whole model"
            return f"{where}, {problem}"

    how.draw(ShardStreams(dist.get_rank(), torch.device("cpu")))
    with without_casts() if "casts" in kinds else nullcontext():
        problem = _disagreement(_gradients(workload, sharded, batch, how))
    return f"with dropout on, the shards disagree: {problem}" if problem else None


def _describe(errors: dict[str, float]) -> str | None:
    """Describe the largest error. If only the optimizer's step differs, say so."""
    before = {name: error for name, error in errors.items() if not name.startswith("updated ")}
    problem = worst_of(errors)
    only_step = problem and not worst_of(before)
    return f"the optimizer needs full parameters: {problem}" if only_step else problem


def _train_step(workload: Workload, model: nn.Module, batch: Any, how: Sharded = WHOLE) -> Values:
    optimizer = make_optimizer(workload, model)
    with restored(model) as before:
        values = _gradients(workload, model, batch, how)
        buffers = changed_buffers(model, before)
    try:
        with mixing_tensors():
            optimizer.step()
    except Exception as error:
        needs = f"{type(optimizer).__name__} needs full parameters"
        raise RuntimeError(f"{needs} ({first_line(error)})") from error
    updated = {f"updated {name}": whole(p).detach() for name, p in model.named_parameters()}
    return values | buffers | updated


def _gradients(workload: Workload, model: nn.Module, batch: Any, how: Sharded = WHOLE) -> Values:
    """Return the loss and all gradients of a backward pass."""
    samples, share = how.own(batch)
    inputs, targets = (workload.unpack or unpack)(copied(samples))
    seed_everything(0)
    model.zero_grad(set_to_none=True)
    with how.training():
        loss = weighted_loss(workload, call_model(model, inputs), targets, share)
        loss.backward()
    return {"loss": how.total(loss.detach()), **gradients_of(model)}


def _disagreement(values: Values) -> str | None:
    """Describe the value that differs most between ranks, if any."""
    first = {name: value.clone() for name, value in values.items()}
    for value in first.values():
        dist.broadcast(value, 0)
    errors = errors_of(values, first)
    worst = torch.tensor([errors[name] for name in values])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst_of(dict(zip(values, worst.tolist(), strict=True)))
