"""FSDP in a pipeline: the units of one part of the model, and when they communicate.

With several micro-batches in a step, each rank accumulates full gradients and reduces them once,
after the last micro-batch. With --zero 3, a unit's parameters are gathered for each pass of each
micro-batch. With --zero 2, they are gathered once per optimizer step:

    --zero 3   [gather][F0] [gather][F1] [gather][B0] [gather][B1][reduce-scatter]
    --zero 2   [gather][F0]         [F1]         [B0]         [B1][reduce-scatter]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paralab.plan.sharding import is_in, units_in
from paralab.worker.rank_context import RankContext
from paralab.worker.sharding.collective_order import CollectiveOrder
from paralab.worker.sharding.sharded_units import ShardedUnits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Shell(nn.Module):
    """Has the parameters of a module, but not its submodules, which may belong to other stages."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = module._parameters  # share the dict, so that changes apply to both


class ShardedStage(nn.Module):
    """Part `number` of the model. fully_shard makes this the root FSDP module of the part."""

    running: ShardedStage | None = None  # the part that runs forward in this process

    def __init__(
        self,
        context: RankContext,
        model: nn.Module,
        number: int,
        mesh: DeviceMesh,
        order: CollectiveOrder,
    ) -> None:
        super().__init__()
        plan = context.plan
        modules, part = dict(model.named_modules()), plan.stage_parts[number]
        units = units_in(part, plan.shard_units)
        rest = [name for name in part.modules if not any(is_in(name, unit) for unit in units)]
        self.inside = nn.ModuleList(modules[name] for name in units)
        # FSDP recognizes a module that it has already sharded, but not the module's shell.
        own = [modules[name] for name in rest]
        self.outside = nn.ModuleList(Shell(m) if [*m.children()] else m for m in own)
        candidates = {name: modules[name] for name in [*part.modules, *units]}
        name = f"the rest of part {number}" if plan.chunks > 1 else "the rest"
        self.sharded = ShardedUnits(context, self, candidates, mesh, order, name)
        self.fsdp: Any = self  # fully_shard changed the class of this module
        self.frees = plan.zero == 3
        self.pinned = False
        self.alone = plan.chunks == 1
        self._set_up([unit.module for unit in self.sharded.units if unit.name in units])

    def _set_up(self, units: Sequence[Any]) -> None:
        self.fsdp.set_requires_gradient_sync(False)
        self._free_after_passes(self.frees)
        if not self.alone:
            for unit in units:
                self._guard(unit)
        # By default, FSDP prefetches the unit that ran before this one, maybe for another
        # micro-batch.
        for unit, earlier in zip(units, [*units[:1], *units], strict=False):
            unit.set_modules_to_backward_prefetch([earlier])
        self.fsdp.set_modules_to_backward_prefetch([*units[-1:], self][:1])
        self.fsdp._get_fsdp_state()._lazy_init()  # make this module the root

    def _guard(self, unit: Any) -> None:
        """Make FSDP ignore a call from another part of the model, which calls this unit only to get
        shapes."""
        state = unit._get_fsdp_state()

        def only_here(hook: Callable[..., Any]) -> Callable[..., Any]:
            def guarded(*call: Any) -> Any:
                return hook(*call) if ShardedStage.running in (None, self) else None

            return guarded

        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        before, after = only_here(state._pre_forward), only_here(state._post_forward)
        unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        unit.register_forward_hook(after)

    def forward(self, call: Callable[[], Any]) -> Any:
        ShardedStage.running = self
        try:
            return call()
        finally:
            ShardedStage.running = None

    def pin(self) -> None:
        """Gather all parameters and keep them, so that the next passes need no collectives."""
        self.pinned = True
        self._free_after_passes(False)
        for unit in self.sharded.units:
            unit.module.unshard()

    def unpin(self) -> None:
        if self.pinned:
            self.pinned = False
            self._free_after_passes(self.frees)
            for unit in self.sharded.units:
                unit.module.reshard()

    def _free_after_passes(self, free: bool) -> None:
        for unit in self.sharded.units[:-1]:
            unit.module.set_reshard_after_forward(free)
        self.fsdp.set_reshard_after_backward(free)
        if not self.alone:  # other parts of the model on this rank may read these shapes
            self.fsdp.set_reshard_after_backward(False, recurse=False)

    def reduce(self) -> None:
        """Reduce the gradients of all micro-batches, and free the parameters."""
        self.fsdp.set_requires_gradient_sync(True)
        self.fsdp.set_reshard_after_backward(True)
        # At the end of a backward pass, FSDP calls this function, which reduces all units.
        self.fsdp._get_fsdp_state()._root_post_backward_final_callback()
        self.fsdp.set_requires_gradient_sync(False)
        self._free_after_passes(self.frees)


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Return whether the flag is set on any rank of a gloo group."""
    anywhere = torch.tensor(int(flag))
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    return bool(anywhere)
