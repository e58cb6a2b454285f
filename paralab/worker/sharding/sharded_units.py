"""Shard modules with the real FSDP2 (`fully_shard`): the units of a model, or of a stage.

Each collective is timed, and compared with those of the other ranks (`CollectiveOrder`). Importing
FSDP2 takes half a second, so functions import it where they use it, and other strategies start
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paralab.errors import ParalabError
from paralab.plan.plan import Plan
from paralab.plan.sharding import MIXED_DTYPES, NOT_ON_SHARDS
from paralab.worker.groups import (
    group_along,
    group_of,
    has_axes,
    ranks_with,
    replica_group,
    whole_model_groups,
)
from paralab.worker.measure.memory import addresses
from paralab.worker.measure.probes import runs_on_stream
from paralab.worker.precision import LOW
from paralab.worker.rank_context import RankContext
from paralab.worker.sharding.collective_order import CollectiveOrder
from paralab.worker.sharding.sharded_layers import mixing_tensors
from paralab.worker.sharding.shards import is_split, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# PyTorch 2.13 renamed both functions and warns about the old names.
COLLECTIVES: dict[str, Any] = {
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
}


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, and their gathered sizes. `module` is an FSDPModule,
    because torch changes the module's class in place."""

    name: str
    module: Any
    parameter_bytes: int
    gradient_bytes: int


class ShardedUnits:
    """The units of `root`, and the rest of `root`. All become FSDP modules in place."""

    def __init__(
        self,
        context: RankContext,
        root: nn.Module,
        modules: Mapping[str, nn.Module],
        mesh: DeviceMesh,
        order: CollectiveOrder,
        rest: str = "the rest",
    ) -> None:
        """Shard those units of the plan that are in `modules`. `rest` names the other parameters."""
        plan, rank = context.plan, context.rank
        self.context, self.order = context, order
        sharded = _shard(context, root, modules, mesh)
        self.units = [Unit(name, unit, *_unit_bytes(context, unit)) for name, unit in sharded]
        together = ranks_with(plan, "replicas", rank.rank) if has_axes(plan) else None
        for number, unit in enumerate(self.units):
            where = {"bucket": number, "unit": unit.name or rest, "ranks": together}
            where |= {} if rank.stage is None else {"stage": rank.stage}
            self._time_collectives(unit, where)
            if context.meter.enabled:
                _exclude_from_activations(context, unit.module)

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


def gathered_bytes(sharded: Sequence[ShardedUnits], zero: int | None) -> int:
    """Return the bytes of the full parameters that exist at the same time: those outside all units,
    and those of the current and the prefetched unit. With ZeRO-2, those of all units."""
    sizes = [unit.parameter_bytes for each in sharded for unit in each.units[:-1]]
    rest = sum(each.units[-1].parameter_bytes for each in sharded)
    pairs = [one + other for one, other in pairwise(sizes)] or sizes
    return rest + (sum(sizes) if zero == 2 else max(pairs, default=0))


def _shard(
    context: RankContext, root: nn.Module, modules: Mapping[str, nn.Module], mesh: DeviceMesh
) -> Iterator[tuple[str, Any]]:
    """Shard the plan's units, nested units first, and then the rest. Yield names and modules."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plan = context.plan
    low = LOW.get(plan.precision)
    policy = MixedPrecisionPolicy(low, torch.float32) if low else MixedPrecisionPolicy()
    # As under autocast, the loss is computed in fp32. Only the model's output goes to the loss, not
    # a stage's.
    whole = low and not plan.schedule
    root_policy = replace(policy, output_dtype=torch.float32) if whole else policy
    # BatchNorm's statistics are fp32 buffers and need fp32 parameters, as in FSDP1.
    norms = [
        name
        for name, module in modules.items()
        if low and isinstance(module, nn.modules.batchnorm._BatchNorm) and [*module.parameters()]
    ]

    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    for name in dict.fromkeys([*norms, *plan.shard_units]):
        if name not in modules:
            continue
        chosen = full if name in norms else policy
        again = plan.zero == 3  # gather again in the backward pass
        unit = fully_shard(modules[name], mesh=mesh, mp_policy=chosen, reshard_after_forward=again)
        yield name, unit
    yield "", fully_shard(root, mesh=mesh, mp_policy=root_policy)


def replica_mesh(plan: Plan, rank: int) -> DeviceMesh:
    """Return the ranks that shard this rank's parameters, as a grid: hybrid's replicas × shards,
    shard groups × parts, or a single dim otherwise."""
    from torch.distributed.device_mesh import DeviceMesh

    if plan.tensor_plan:
        groups = [group_along(plan, axis, rank) for axis in ("replicas", "shards")]
        shape, names = (plan.replicas, plan.shards), ("replicas", "shards")
    elif plan.shard_groups > 1:
        parts = plan.shards_per_parameter
        groups = [group_of(plan, "copies", rank % parts), *whole_model_groups(plan, rank)]
        shape, names = (plan.shard_groups, parts), ("copies", "parts")
    else:
        return DeviceMesh.from_group(replica_group(plan, rank), plan.device)
    stage = plan.ranks[rank].stage
    numbers = torch.tensor([each.rank for each in plan.ranks if each.stage == stage])
    return DeviceMesh.from_group(
        groups, plan.device, mesh=numbers.view(shape), mesh_dim_names=names
    )


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


@contextmanager
def explain_dtypes(plan: Plan) -> Iterator[None]:
    """Explain that FSDP does not cast everything to low precision, and rejects mixed dtypes."""
    try:
        yield
    except AssertionError as error:
        if "uniform original parameter dtype" not in str(error):
            raise
        problem = f"{plan.strategy}: {MIXED_DTYPES} ({error})"
        raise ParalabError(
            problem, fix="complex parameters in modules of their own, or ddp"
        ) from error
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
def stepping_on_shards(plan: Plan) -> Iterator[None]:
    """Run an optimizer step on shards, and explain the error if torch cannot."""
    try:
        with mixing_tensors() if plan.tensor_plan or plan.schedule else nullcontext():
            yield
    except (RuntimeError, NotImplementedError) as error:
        first = str(error).partition("\n")[0]
        if "placement" not in first and "sharding" not in first.lower():
            raise
        problem = f"{plan.strategy}: {NOT_ON_SHARDS} ({first})"
        raise ParalabError(problem, fix="--zero 1, another optimizer, or ddp") from error
