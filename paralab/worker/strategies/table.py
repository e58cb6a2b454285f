"""The strategies by name."""

from __future__ import annotations

from torch import nn

from paralab.worker.rank_context import RankContext, Strategy
from paralab.worker.strategies.data_parallel import DataParallel
from paralab.worker.strategies.ddp import Ddp
from paralab.worker.strategies.fsdp import Fsdp
from paralab.worker.strategies.hybrid import Hybrid
from paralab.worker.strategies.pipeline_processes import PipelineProcesses
from paralab.worker.strategies.pipeline_threads import PipelineThreads
from paralab.worker.strategies.single import Single


def make_strategy(context: RankContext, model: nn.Module) -> Strategy:
    """Make the plan's strategy. `mp` is a pipeline with one micro-batch. With --schedule, each
    stage has its own process."""
    if context.plan.schedule:
        return PipelineProcesses(context, model)
    match context.plan.strategy:
        case "single":
            return Single(context, model)
        case "dp":
            return DataParallel(context, model)
        case "ddp":
            return Ddp(context, model)
        case "fsdp":
            return Fsdp(context, model)
        case "mp" | "pipeline":
            return PipelineThreads(context, model)
        case "hybrid":
            return Hybrid(context, model)
        case unknown:
            raise AssertionError(f"no strategy {unknown!r}")
