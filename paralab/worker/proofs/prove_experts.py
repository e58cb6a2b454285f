"""Find a way to divide a workload's experts among ranks, and prove it. Each rank is a CPU process
that uses gloo.

Unlike the ranks of `tp` and `cp`, each rank trains on its own samples. So the loss is a sum over
ranks, and a batch must train like the sum of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralab.plan.batches import replica_span
from paralab.plan.expert_plan import NO_LAYERS, NOT_ADDITIVE, uneven
from paralab.worker.proofs.block_proof import Shard, Sharded, begin_together
from paralab.worker.proofs.model_proof import prove_together
from paralab.worker.proofs.proof_model import load_for_proof
from paralab.worker.sharding.collective_order import CollectiveOrder
from paralab.worker.sharding.split_experts import SplitExperts
from paralab.workload.batch import call_model, copied, num_samples, take, tensors
from paralab.workload.expert_layers import read_call, stacked_experts
from paralab.workload.expert_plan import ExpertLayer, ExpertPlan
from paralab.workload.hooks import watched
from paralab.workload.randomness import seed_everything
from paralab.workload.state import restored
from paralab.workload.verify_controls import controlled
from paralab.workload.workload import Workload


def find_expert_plan(workload: Workload, shards: int) -> ExpertPlan:
    """Prove all layers together, with samples that do not divide evenly."""
    model, inputs, batch, casts = load_for_proof(workload, 2 * shards + 1)
    kinds = ["batch_norm", *casts]
    with controlled(model, kinds), restored(model):
        seed_everything(0)
        layers = tuple(observe_experts(model, inputs, shards))
    plan = ExpertPlan(shards, layers)
    if not plan.kept:
        return replace(plan, problem=next((each.reason for each in layers), NO_LAYERS))

    mesh = DeviceMesh("cpu", list(range(shards)), mesh_dim_names=("shards",))
    problem = prove_together(workload, model, batch, _splitter(workload, plan.kept, mesh), kinds)
    if problem:
        whole = _splitter(workload, (), mesh)
        without = prove_together(workload, model, batch, whole, kinds)
        problem = f"{NOT_ADDITIVE} ({without})" if without else problem
    return replace(plan, problem=problem)


def observe_experts(model: nn.Module, inputs: Any, shards: int) -> Iterator[ExpertLayer]:
    """Yield all expert layers. A layer that cannot be divided comes with the reason."""
    calls: dict[str, list[Any]] = {name: [] for name in stacked_experts(model)}

    def enter(name: str, arguments: Any) -> None:
        if name in calls:
            call = read_call(arguments)
            calls[name].append(call and list(tensors(arguments))[call.chosen])

    with watched(model, enter), torch.no_grad():
        call_model(model, copied(inputs))
    names: dict[nn.Parameter, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(path)

    yielded: list[str] = []
    for name, experts in stacked_experts(model).items():
        fits = bool(calls[name]) and all(each is not None for each in calls[name])
        inside = [other for other in calls if other.startswith(f"{name}.")]
        if name.startswith(tuple(yielded)) or (inside and not fits):
            continue
        yielded.append(f"{name}.")
        own = list(model.get_submodule(name).parameters())
        outside = [p for each in own for p in names[each] if not p.startswith(f"{name}.")]
        chosen = calls[name]
        reason = uneven(name, experts, shards) or ""
        if not chosen:
            reason = f"the trial did not call {name}"
        elif not fits:
            reason = f"{name} is not called with tokens, their chosen experts, and weights"
        elif outside:
            reason = f"{outside[0]} shares a parameter with {name}"
        most = max((each[:1].numel() for each in chosen if each is not None), default=0)
        yield ExpertLayer(name, experts, most, sum(p.numel() for p in own), reason)


def _splitter(workload: Workload, layers: Sequence[ExpertLayer], mesh: DeviceMesh) -> Shard:
    def own(batch: Any) -> tuple[Any, float]:
        """Return this rank's samples, as in a run. A rank without samples borrows one."""
        size, weigh = num_samples(batch), workload.weight or num_samples
        spans = [replica_span(size, mesh.size(), rank) for rank in range(mesh.size())]
        weights = [float(weigh(take(batch, *each))) if each[1] > each[0] else 0.0 for each in spans]
        start, stop = spans[dist.get_rank()]
        samples = take(batch, start, stop) if stop > start else take(batch, 0, 1)
        return samples, weights[dist.get_rank()] / (sum(weights) or 1.0)

    order = CollectiveOrder(dist.new_group(), dist.get_rank(), "ep")

    def begin(kind: str, *what: Any, **_: Any) -> Callable[[], None]:
        ready = begin_together()
        order.announce(f"{kind} {what[2:]}")
        return ready

    def total(loss: torch.Tensor) -> torch.Tensor:
        begin("sum the loss")
        dist.all_reduce(loss)
        return loss

    def shard(model: nn.Module) -> Sharded:
        split = SplitExperts(model, layers, mesh, begin)
        order.begin(0)

        @contextmanager
        def training() -> Iterator[None]:
            yield
            split.sum_gradients(begin)

        return Sharded(training, own=own, total=total)

    return shard
