"""`fsdp --zero 1`: torch's ZeroRedundancyOptimizer. Each rank updates some of the parameters, keeps
their optimizer state, and then broadcasts the parameters to the other ranks.

Importing ZeroRedundancyOptimizer takes a second, so only this strategy imports it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from paralab.errors import UsageError
from paralab.worker.groups import group_of
from paralab.worker.memory import addresses
from paralab.worker.rank_context import RankContext

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
        contiguous = all(each.is_contiguous() for each in parameters)
        context.meter.ignored -= addresses(parameters)
        try:
            super().__init__(
                whole.param_groups,
                keep_own,
                process_group=group_of(context.plan),
                parameters_as_bucket_view=contiguous,
                **whole.defaults,
            )
        except ValueError as error:  # the parameters have several dtypes
            raise UsageError(f"--zero 1: {error}.", fix="one dtype, --zero 2, or ddp") from error
        context.meter.ignored |= addresses(parameters)

    def _sync_params(self) -> None:
        """Broadcast each rank's parameters, and time the broadcasts."""
        group = group_of(self.context.plan)
        begin = partial(self.context.probe.begin_collective, "broadcast", group=group)
        running: list[Any] = []
        for rank in range(self.world_size):
            notes = [begin(tensor, bucket=rank, blocking=True) for tensor in self._sent_by(rank)]
            running += zip(self._broadcast_params_from_rank(rank), notes, strict=True)
        for work, note in running:
            work.wait()
            note()

    def _sent_by(self, rank: int) -> list[torch.Tensor]:
        if self.parameters_as_bucket_view:
            return [buckets[rank] for buckets in self._buckets]
        groups = self._partition_parameters()[rank]
        return [parameter for group in groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's parameters."""
        state: dict[str, Any] = self.optim.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this rank's parameters, and the settings of all parameters."""
        self.optim.load_state_dict(state_dict)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
