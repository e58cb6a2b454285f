"""All strategies, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from paralab.worker.rank_context import RankContext, Strategy
from paralab.worker.strategies.cp import Cp
from paralab.worker.strategies.data_parallel import DataParallel
from paralab.worker.strategies.ddp import Ddp
from paralab.worker.strategies.ep import Ep
from paralab.worker.strategies.fsdp import Fsdp
from paralab.worker.strategies.hybrid import Hybrid
from paralab.worker.strategies.local_sgd import LocalSgd
from paralab.worker.strategies.pipeline_processes import PipelineProcesses
from paralab.worker.strategies.pipeline_threads import PipelineThreads
from paralab.worker.strategies.simulation import simulate
from paralab.worker.strategies.single import Single
from paralab.worker.strategies.tp import Tp

STRATEGIES: dict[str, Callable[[RankContext, nn.Module], Strategy]] = {
    "single": Single,
    "dp": DataParallel,
    "ddp": Ddp,
    "fsdp": Fsdp,
    "tp": Tp,
    "cp": Cp,
    "ep": Ep,
    "mp": PipelineThreads,  # the same strategy with one micro-batch
    "pipeline": PipelineThreads,
    "hybrid": Hybrid,
    "local-sgd": LocalSgd,
}


def make_strategy(context: RankContext, model: nn.Module) -> Strategy:
    """Create the plan's strategy. With --schedule, each stage has its own process. With --zero 1,
    only the optimizer is sharded (`ShardedOptimizer`)."""
    plan = context.plan
    if plan.simulation:
        return simulate(context, model, plan.simulation)
    if plan.schedule:
        return PipelineProcesses(context, model)
    if plan.shards_parameters:
        return Fsdp(context, model)
    if plan.tensor_plan:
        return Tp(context, model)
    name = "ddp" if plan.strategy == "fsdp" else plan.strategy
    return STRATEGIES[name](context, model)
