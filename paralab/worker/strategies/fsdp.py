"""`fsdp`: one process per replica and the real FSDP2 (`fully_shard`), each with its part of every
parameter, gradient and state.

One pass of one rank over two units (blocks, say). A gather makes a unit's parameters whole; they
are let go after use:

    forward    [gather 0][ unit 0 ][gather 1][ unit 1 ]
    backward                    [gather 1][ unit 1 ][gather 0][reduce-scatter 1][ unit 0 ][reduce-scatter 0]

The losses are already weighted by their share of the global batch (`RankContext.weighted_loss`), so
gradients are summed over ranks, not averaged. FSDP2 is half a second of imports: it is imported
where it is used, so that no other strategy pays for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paralab.errors import ParalabError
from paralab.worker.accumulation import accumulate
from paralab.worker.collective_order import Agreement
from paralab.worker.groups import checking_group, group_of
from paralab.worker.precision import LOW
from paralab.worker.rank_context import Pass, RankContext
from paralab.worker.shards import is_sharded

# PyTorch 2.13 renamed both, and warns at the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Fsdp:
    def __init__(self, job: RankContext, model: nn.Module) -> None:
        self.job = job
        self.model: Any = model.to(job.rank.devices[0].torch)
        # Parts of models that began differently would be a model that nobody made: as in DDP, rank
        # 0's counts.
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_contiguous():  # an expanded buffer cannot be received; as bytes, since gloo does not know every type
                dist.broadcast(tensor.detach().view(-1).view(torch.uint8), 0, group_of(job.plan))
        places = job.meter.ignore(model.parameters())
        self.units = [
            Unit(name, module, *_unit_bytes(job, module)) for name, module in _shard(job, model)
        ]
        job.meter.forget(places)  # the whole parameters are gone
        self.agreement = Agreement(checking_group(job.plan), job.rank.rank)
        for number, unit in enumerate(self.units):
            where = {"bucket": number, "unit": unit.name or "the rest"}
            unit.module.set_custom_all_gather(TimedAllGather(job, where, self.agreement))
            scattering = TimedReduceScatter(job, where, self.agreement)
            unit.module.set_custom_reduce_scatter(scattering)
            _tell_gradients(unit.module, scattering)
            # Without the second line the sum is asked for as PREMUL_SUM, which gloo does not have.
            unit.module.set_gradient_divide_factor(1.0)
            unit.module.set_force_sum_reduction_for_comms(True)
            if job.meter.enabled:
                _leave_out_of_the_activations(job, unit.module)

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        # Every pass gathers, so every rank must make as many: those that a small last batch leaves
        # out count nothing.
        idle = [replace(micro, share=0.0) for micro in passes[0]]
        passes = [idle] * (self.job.plan.accumulate - len(passes)) + passes
        waits = nullcontext if self.job.plan.sync_every_pass else self._unsynchronized
        self.agreement.begin(self.job.probe.step)
        try:
            loss = accumulate(self.job, self.model, passes, unsynchronized=waits)
            self.agreement.end()
            return loss
        except RuntimeError as error:
            if self.job.plan.precision in LOW and (
                "dtype" in str(error) or "scalar type" in str(error)
            ):
                raise ParalabError(
                    f"fsdp in {self.job.plan.precision}: the forward mixes types ({error}). FSDP casts parameters and inputs of "
                    "units, not what the model makes itself or keeps as a buffer.",
                    fix="cast such tensors to x.dtype in the forward, or use --precision fp32, or ddp (autocast)",
                ) from error
            raise

    @contextmanager
    def _unsynchronized(self) -> Iterator[None]:
        """The gradients stay whole on every rank: no communication, but as much memory as ddp's."""
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def held_for_a_while(self) -> dict[str, int]:
        """Bytes that are whole at the same time in a backward pass, from the units' sizes.
        Parameters: of the rest, of a unit and of the one gathered ahead. Gradients: of one unit, or
        of all while passes are accumulated without synchronization."""
        if self.job.plan.world_size == 1:
            return {}
        *units, rest = self.units
        pairs = [one.whole_bytes + other.whole_bytes for one, other in pairwise(units)] or [
            u.whole_bytes for u in units
        ]
        gradients = [unit.gradient_bytes for unit in self.units]
        together = self.job.plan.accumulate > 1 and not self.job.plan.sync_every_pass
        return {
            "gathered": rest.whole_bytes + max(pairs, default=0),
            "unreduced": sum(gradients) if together else max(gradients),
        }


@dataclass(frozen=True)
class Unit:
    """What is gathered as one. `module` has become an FSDPModule: torch changes its class in
    place."""

    name: str
    module: Any
    whole_bytes: int
    gradient_bytes: int


def _shard(job: RankContext, model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Shard the plan's units and then the whole model, which takes what is left: (name, module) of
    each. Inner ones come first."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = LOW.get(job.plan.precision)
    mesh = DeviceMesh.from_group(group_of(job.plan), job.plan.device)
    policy = MixedPrecisionPolicy(low, torch.float32) if low else MixedPrecisionPolicy()
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    names = dict.fromkeys(job.plan.shard_units, policy)
    if low:  # its statistics are fp32 buffers, which do not go with low parameters; FSDP1 wrapped it in the same way
        norms = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]
        names = {
            name: full
            for name in norms
            if any(True for _ in model.get_submodule(name).parameters())
        } | names
    for name in names:
        module = model.get_submodule(name)
        chosen = full if low and isinstance(module, nn.modules.batchnorm._BatchNorm) else policy
        yield name, fully_shard(module, mesh=mesh, mp_policy=chosen)
    # The loss is computed from fp32, as under autocast.
    root = replace(policy, output_dtype=torch.float32) if low else policy
    yield "", fully_shard(model, mesh=mesh, mp_policy=root)


def _unit_bytes(job: RankContext, module: Any) -> tuple[int, int]:
    """(parameters, gradients) of a unit when they are whole, without those of units inside it."""
    low = LOW.get(job.plan.precision)
    inner = {
        id(p)
        for m in module.modules()
        if m is not module and hasattr(m, "unshard")
        for p in m.parameters()
    }
    own = [p for p in module.parameters() if id(p) not in inner]
    parameters = sum(p.numel() * (low.itemsize if low else p.element_size()) for p in own)
    return parameters, sum(p.numel() * p.element_size() for p in own if p.requires_grad)


def _leave_out_of_the_activations(job: RankContext, module: nn.Module) -> None:
    """What autograd keeps of a unit's whole parameters is counted as gathered, not as
    activations."""
    places: set[int] = set()

    def before(
        called: nn.Module, _: Any
    ) -> None:  # registered after FSDP's own hook, so the parameters are whole by now
        if job.meter.enabled:
            places.update(job.meter.ignore(p for p in called.parameters() if not is_sharded(p)))

    def after(*_: Any) -> None:
        job.meter.forget(places)
        places.clear()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _tell_gradients(module: Any, scattering: TimedReduceScatter) -> None:
    """Tell the reduce-scatter which parameters of the unit have a gradient. FSDP packs only those,
    whatever other ranks do."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        held = [
            p
            for p in group.fsdp_params
            if hasattr(p, "_unsharded_param") and p.unsharded_param.requires_grad
        ]
        used = [
            p
            for p in held
            if p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None
        ]
        names = [p._module_info.param_name if p._param_fqn is None else p._param_fqn for p in used]
        scattering.gradients = (
            ""
            if len(used) == len(held)
            else f" ({len(used)} of {len(held)} gradients: {', '.join(names)})"
        )
        reduce(*unused)

    group.post_backward = post_backward


class _Timed:
    """A collective of one unit, in FSDP's own interface for them: run as FSDP would, and noted."""

    def __init__(self, job: RankContext, where: dict[str, Any], agreement: Agreement) -> None:
        self.job, self.where, self.agreement = job, where, agreement
        self.gradients = ""  # of a unit's parameters: which have one, where some have none

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @contextmanager
    def _noted(self, event: str, whole: torch.Tensor, group: dist.ProcessGroup) -> Iterator[None]:
        """From ready to done. gloo holds this thread, nothing computes meanwhile; NCCL runs on
        FSDP's stream, current here."""
        probe = self.job.probe
        device = str(whole.device) if whole.is_cuda else None
        on_stream = whole.is_cuda and "nccl" in dist.get_backend(group)
        probe.bytes += whole.nbytes
        start = probe.clock.mark(device)
        yield
        if probe.detailed:
            end = probe.clock.mark(device) if on_stream else probe.clock.now()
            probe.note(event, start, end, **self.where, bytes=whole.nbytes, blocking=not on_stream)


class TimedAllGather(_Timed):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert not async_op  # FSDP asks for it only where unshard(async_op=True) is called
        self.job.probe.all_gathers += 1
        self.agreement.announce(f"gather {self.where['unit']!r}")
        with self._noted("all_gather", output_tensor, group):
            work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group)
        return work


class TimedReduceScatter(_Timed):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert not async_op
        self.job.probe.reduce_scatters += 1
        self.agreement.announce(f"reduce {self.where['unit']!r}{self.gradients}")
        with self._noted("reduce_scatter", input_tensor, group):
            work: dist.Work | None = _reduce_scatter(
                output_tensor, input_tensor, op=op, group=group
            )
        return work
