"""`fsdp`: one process per replica with the real FSDP2 (`fully_shard`). Each rank has a shard of
every parameter, gradient, and optimizer state.

The diagram shows one accumulation step on one rank, for a model with two units (for example, two
blocks). An all-gather collects a unit's full parameters, which are freed after use:

    forward    [gather 0][ unit 0 ][gather 1][ unit 1 ]
    backward   [gather 1][ unit 1 ][gather 0][reduce-scatter 1][ unit 0 ][reduce-scatter 0]

With --zero 2, units stay gathered until their backward pass, which does not gather again. With
--shard-groups (HSDP), an all-reduce between the groups follows each reduce-scatter.

Losses are already weighted by their share of the global batch (`RankContext.weighted_loss`), so
gradients are summed over ranks, not averaged. Importing FSDP2 takes half a second, so functions
import it where they use it, and other strategies start faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paralab.errors import ParalabError
from paralab.plan.plan import Plan
from paralab.plan.sharding import NOT_ON_SHARDS
from paralab.worker.collective_order import CollectiveOrder
from paralab.worker.groups import (
    broadcast_model,
    group_along,
    group_of,
    ranks_with,
    whole_model_group,
)
from paralab.worker.memory import addresses
from paralab.worker.precision import LOW
from paralab.worker.probes import runs_on_stream
from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy
from paralab.worker.sharded_layers import mixing_tensors
from paralab.worker.shards import is_split, local
from paralab.worker.split_layers import (
    align_shards,
    require_agreement,
    running_shards,
    split_layers,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# PyTorch 2.13 renamed both functions and warns about the old names.
COLLECTIVES: dict[str, Any] = {
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
}


class Fsdp(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        plan, device = context.plan, context.rank.devices[0]
        self.context = context
        self.model: Any = model.to(device.torch)
        broadcast_model(model, group_of(plan))

        full = addresses(model.parameters())
        mesh = _mesh(plan, context.rank.rank)
        if plan.tensor_plan:
            split_layers(context, model, plan.tensor_plan.kept, mesh["shards"])
            mesh = mesh["replicas"]
            if plan.scaler:
                context.precision.agreed_over = group_of(plan)
        sharded = _shard(context, model, mesh)
        self.units = [Unit(name, unit, *_unit_bytes(context, unit)) for name, unit in sharded]
        context.meter.ignored -= full  # the full parameters are freed

        self.order = CollectiveOrder(group_of(plan, "order"), context.rank.rank)
        together = ranks_with(plan, "replicas", context.rank.rank) if plan.tensor_plan else None
        for number, unit in enumerate(self.units):
            where = {"bucket": number, "unit": unit.name or "the rest", "ranks": together}
            self._time_collectives(unit, where)
            if context.meter.enabled:
                _exclude_from_activations(context, unit.module)
        context.note_split.watch(self.model, device.name)

    def _time_collectives(self, unit: Unit, where: dict[str, Any]) -> None:
        all_gather, reduce_scatter = (
            TimedCollective(kind, self.context, where, self.order) for kind in COLLECTIVES
        )
        unit.module.set_custom_all_gather(all_gather)
        unit.module.set_custom_reduce_scatter(reduce_scatter)
        _report_missing_gradients(unit.module, reduce_scatter)
        if self.context.plan.shard_groups > 1:
            self._time_all_reduce(unit, where, reduce_scatter)
        # Without set_force_sum_…, FSDP uses PREMUL_SUM, which gloo does not support.
        unit.module.set_gradient_divide_factor(1.0)
        unit.module.set_force_sum_reduction_for_comms(True)

    def _time_all_reduce(
        self, unit: Unit, where: dict[str, Any], reduce_scatter: TimedCollective
    ) -> None:
        """Time HSDP's all-reduce, which runs right after the reduce-scatter. torch calls our hook
        when the all-reduce is done."""
        plan, rank, probe = self.context.plan, self.context.rank.rank, self.context.probe
        group = group_of(plan, "copies", rank % plan.shards_per_parameter)
        notes = []

        def begin(shard: torch.Tensor) -> None:
            blocking = not runs_on_stream(shard, group)
            notes.append(
                probe.begin_collective("all_reduce", shard, group, **where, blocking=blocking)
            )

        reduce_scatter.then = begin
        unit.module.set_all_reduce_hook(lambda reduced: notes.pop()())

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        plan = self.context.plan
        # Each accumulation step gathers parameters, so all ranks must run the same number of steps.
        # If a small last batch has fewer, add steps with weight zero.
        idle = [replace(micro, share=0.0) for micro in accumulation_steps[0]]
        missing = plan.accumulate - len(accumulation_steps)
        steps = [idle] * missing + accumulation_steps

        unsynchronized = nullcontext if plan.sync_every_pass else self._unsynchronized
        self.order.begin(self.context.probe.step)
        try:
            align_shards(self.context, self.model)
            with running_shards(self.context):
                loss = self.accumulate(self.model, steps, unsynchronized)
            self.order.end()
            require_agreement(self.context, loss)
            return torch.zeros_like(loss) if self.context.rank.shard else loss
        except RuntimeError as error:
            mixes_types = "dtype" in str(error) or "scalar type" in str(error)
            if plan.precision not in LOW or not mixes_types:
                raise
            raise ParalabError(
                f"fsdp in {plan.precision}: the model mixes dtypes ({error}). FSDP casts the "
                "parameters and inputs of units, but not buffers or tensors that forward() creates.",
                fix="cast such tensors to x.dtype in forward(), or use --precision fp32, "
                "or ddp (autocast)",
            ) from error

    @contextmanager
    def _unsynchronized(self) -> Iterator[None]:
        """Keep full gradients on all ranks. This saves communication, but needs more memory."""
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        try:
            with mixing_tensors() if self.context.plan.tensor_plan else nullcontext():
                yield
        except (RuntimeError, NotImplementedError) as error:
            first = str(error).partition("\n")[0]
            if "placement" not in first and "sharding" not in first.lower():
                raise
            problem = f"{self.context.plan.strategy}: {NOT_ON_SHARDS} ({first})"
            raise ParalabError(problem, fix="--zero 1, another optimizer, or ddp") from error

    def transient_bytes(self) -> dict[str, int]:
        """Count the bytes of unsharded tensors that exist at the same time in a backward pass.

        These are the parameters outside all units, of one unit, and of the prefetched unit, and the
        gradients of one unit (or of all units if accumulation steps do not synchronize)."""
        plan = self.context.plan
        if plan.shards_per_parameter == 1:
            return {}
        *units, rest = self.units
        pairs = [one.parameter_bytes + other.parameter_bytes for one, other in pairwise(units)]
        pairs = pairs or [unit.parameter_bytes for unit in units]
        gradients = [unit.gradient_bytes for unit in self.units]
        together = plan.accumulate > 1 and not plan.sync_every_pass
        gathered = rest.parameter_bytes + max(pairs, default=0)
        if plan.zero == 2:  # all units are gathered at the end of the forward pass
            gathered = sum(unit.parameter_bytes for unit in self.units)
        return {"gathered": gathered, "unreduced": (sum if together else max)(gradients)}


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, and their gathered sizes. `module` is an FSDPModule,
    because torch changes the module's class in place."""

    name: str
    module: Any
    parameter_bytes: int
    gradient_bytes: int


def _shard(context: RankContext, model: nn.Module, mesh: DeviceMesh) -> Iterator[tuple[str, Any]]:
    """Shard the plan's units, nested units first, and then the rest. Yield names and modules."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plan = context.plan
    low = LOW.get(plan.precision)
    policy = MixedPrecisionPolicy(low, torch.float32) if low else MixedPrecisionPolicy()
    # The loss is computed in fp32, as under autocast.
    root_policy = replace(policy, output_dtype=torch.float32) if low else policy
    # BatchNorm's statistics are fp32 buffers and need fp32 parameters, as in FSDP1.
    norms = [
        name
        for name, module in model.named_modules()
        if low and isinstance(module, nn.modules.batchnorm._BatchNorm) and [*module.parameters()]
    ]

    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    for name in dict.fromkeys([*norms, *plan.shard_units]):
        chosen = full if name in norms else policy
        unit = model.get_submodule(name)
        again = plan.zero == 3  # gather again in the backward pass
        yield name, fully_shard(unit, mesh=mesh, mp_policy=chosen, reshard_after_forward=again)
    yield "", fully_shard(model, mesh=mesh, mp_policy=root_policy)


def _mesh(plan: Plan, rank: int) -> DeviceMesh:
    """Return the ranks as a grid: hybrid's replicas × shards, shard groups × parts, or a single dim
    otherwise."""
    from torch.distributed.device_mesh import DeviceMesh

    if plan.tensor_plan:
        groups = [group_along(plan, axis, rank) for axis in ("replicas", "shards")]
        shape, names = (plan.replicas, plan.shards), ("replicas", "shards")
    elif plan.shard_groups > 1:
        parts = plan.shards_per_parameter
        groups = [group_of(plan, "copies", rank % parts), whole_model_group(plan, rank)]
        shape, names = (plan.shard_groups, parts), ("copies", "parts")
    else:
        return DeviceMesh.from_group(group_of(plan), plan.device)
    numbered = torch.arange(plan.world_size).view(shape)
    return DeviceMesh.from_group(groups, plan.device, mesh=numbered, mesh_dim_names=names)


def _unit_bytes(context: RankContext, module: Any) -> tuple[int, int]:
    """Return the bytes of a unit's gathered parameters and gradients, excluding nested units."""
    low = LOW.get(context.plan.precision)
    nested = [m for m in module.modules() if m is not module and hasattr(m, "unshard")]
    inner = {id(p) for m in nested for p in m.parameters()}
    own = [p for p in module.parameters() if id(p) not in inner]
    shards = context.plan.shards
    sizes = {p: p.numel() // (shards if is_split(p) else 1) for p in own}
    parameters = sum(n * (low.itemsize if low else p.element_size()) for p, n in sizes.items())
    return parameters, sum(n * p.element_size() for p, n in sizes.items() if p.requires_grad)


def _exclude_from_activations(context: RankContext, module: nn.Module) -> None:
    """Do not count a unit's gathered parameters, which autograd also saves, as activations."""
    gathered: set[int] = set()

    def before(called: nn.Module, _: Any) -> None:
        # This hook runs after FSDP's own hook, so the parameters are already gathered.
        if context.meter.enabled:
            gathered.update(addresses(map(local, called.parameters())))
            context.meter.ignored |= gathered

    def after(*_: Any) -> None:
        context.meter.ignored -= gathered
        gathered.clear()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _report_missing_gradients(module: Any, reduce_scatter: TimedCollective) -> None:
    """Tell the reduce-scatter which of the unit's parameters have a gradient, because FSDP packs
    only those, even if other ranks pack different parameters."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    reduce = group.post_backward

    def post_backward(*args: Any) -> None:
        gathered = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        trained = [p for p in gathered if p.unsharded_param.requires_grad]
        missing = [
            p
            for p in trained
            if p.unsharded_accumulated_grad is None and p.unsharded_param.grad is None
        ]
        reduce_scatter.gradients = ""
        if missing:
            used = [p for p in trained if p not in missing]
            names = ", ".join(p._param_fqn or p._module_info.param_name for p in used)
            reduce_scatter.gradients = f" ({len(used)} of {len(trained)} gradients: {names})"
        reduce(*args)

    group.post_backward = post_backward


class TimedCollective:
    """One unit's all-gather or reduce-scatter, with FSDP's interface for custom collectives.

    gloo blocks this thread until the collective is done. NCCL runs on FSDP's stream, which is the
    current stream here."""

    def __init__(
        self, kind: str, context: RankContext, where: dict[str, Any], order: CollectiveOrder
    ) -> None:
        self.kind, self.context, self.where, self.order = kind, context, where, order
        self.then: Callable[[torch.Tensor], None] | None = None  # called with the output
        self.gradients = ""  # lists the parameters with a gradient, unless all have one

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
        **op: Any,
    ) -> Any:
        assert not async_op  # true only in unshard(async_op=True)
        gathers = self.kind == "all_gather"
        verb, whole = ("gather", output_tensor) if gathers else ("reduce", input_tensor)
        self.order.announce(f"{verb} {self.where['unit']!r}{self.gradients}")
        where = self.where | {"blocking": not runs_on_stream(whole, group)}
        note = self.context.probe.begin_collective(self.kind, whole, group, **where)
        result = COLLECTIVES[self.kind](output_tensor, input_tensor, group=group, **op)
        note()
        if self.then:
            self.then(output_tensor)
        return result
