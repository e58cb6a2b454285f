"""Refuse a model or an optimizer that the strategy would train incorrectly or not at all."""

from __future__ import annotations

from paralab.errors import UsageError
from paralab.plan.request import Request
from paralab.workload.summary import Summary


def require_supported(request: Request, summary: Summary) -> None:
    strategy = request.strategy
    if summary.sparse and strategy not in ("single", "ddp"):
        raise UsageError(
            f"{strategy} cannot train with sparse gradients, "
            f"and {summary.sparse[0]!r} in {summary.name} has one.",
            fix="nn.Embedding(…, sparse=False), or use single or ddp",
        )
    if summary.scalar_output and strategy == "dp":
        raise UsageError(
            f"dp cannot train {summary.name}: its model returns a scalar, such as a loss it "
            "computes itself, and DataParallel would return one per replica.",
            fix="return one value per sample and compute the loss in `loss`, or use ddp",
        )
    if summary.whole_tensors and strategy == "fsdp":
        raise UsageError(
            f"fsdp gives each rank a shard of every parameter, but {summary.optimizer} needs "
            "whole parameters.",
            fix="an elementwise optimizer such as AdamW or SGD, or use ddp",
        )
    if summary.whole_model and request.schedule:
        raise UsageError(
            f"--schedule {request.schedule} gives each stage its own optimizer, but "
            f"{summary.optimizer} needs all parameters at once, for example to clip a global norm.",
            fix="leave out --schedule, so one optimizer sees all parameters",
        )
