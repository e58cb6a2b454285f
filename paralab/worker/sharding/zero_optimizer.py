"""`--zero 1`: torch's ZeroRedundancyOptimizer. Each rank updates some of the parameters, keeps
their optimizer state, and then broadcasts the parameters to the other ranks.

Importing ZeroRedundancyOptimizer takes a second, so only this strategy imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from paralab.errors import UsageError
from paralab.worker.groups import has_axes, ranks_with, replica_group
from paralab.worker.measure.memory import addresses
from paralab.worker.rank_context import RankContext
from paralab.worker.sharding.shards import is_sharded, local

Zero: Any = ZeroRedundancyOptimizer  # torch has no types for this class


class ShardedOptimizer(Zero):  # type: ignore[misc]
    """`optim` is the user's optimizer, which keeps only this rank's parameters."""

    def __init__(self, context: RankContext, whole: Optimizer) -> None:
        self.context = context

        def keep_own(groups: list[dict[str, Any]], **_: Any) -> Optimizer:
            own = {parameter for group in groups for parameter in group["params"]}
            whole.param_groups = groups
            for parameter in [p for p in whole.state if p not in own]:
                del whole.state[parameter]  # some optimizers create their state in advance
            return whole

        parameters = [p for group in whole.param_groups for p in group["params"]]
        # One broadcast per rank is faster, but its buckets would change channels_last parameters'
        # strides, which DDP already uses for gradients.
        contiguous = all(each.is_contiguous() and not is_sharded(each) for each in parameters)
        context.meter.ignored -= addresses(map(local, parameters))
        try:
            super().__init__(
                whole.param_groups,
                keep_own,
                process_group=replica_group(context.plan, context.rank.rank),
                parameters_as_bucket_view=contiguous,
                **whole.defaults,
            )
        except ValueError as error:  # the parameters have multiple dtypes
            raise UsageError(f"--zero 1: {error}.", fix="one dtype, --zero 2, or ddp") from error
        context.meter.ignored |= addresses(map(local, parameters))

    def _sync_params(self) -> None:
        """Broadcast each rank's parameters, and time the broadcasts."""
        group, plan, rank = self.process_group, self.context.plan, self.context.rank
        together = ranks_with(plan, "replicas", rank.rank) if has_axes(plan) else None
        where = {"stage": rank.stage, "ranks": together}
        running: list[tuple[Any, Callable[[], None]]] = []
        for source in range(self.world_size):
            for tensor in self._sent_by(source):
                more: dict[str, Any] = where | {"bucket": source, "blocking": True}
                note = self.context.probe.begin_collective("broadcast", tensor, group, **more)
                root = dist.get_global_rank(group, source)
                running.append((dist.broadcast(tensor, root, group, async_op=True), note))
        for work, note in running:
            work.wait()
            note()

    def _sent_by(self, rank: int) -> list[torch.Tensor]:
        if self.parameters_as_bucket_view:
            return [buckets[rank] for buckets in self._buckets]
        groups = self._partition_parameters()[rank]
        return [local(parameter.data) for group in groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's parameters."""
        state: dict[str, Any] = self.optim.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this rank's parameters, and the settings of all parameters."""
        self.optim.load_state_dict(state_dict)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
