"""`moe`: the transformer of `gpt` with multiple feed-forward networks (experts) per block. A gate
sends each token to the `chosen` experts with the highest scores, and adds their weighted outputs.

We do not drop tokens or balance the experts with a loss, because both would make a sample's result
depend on the rest of its batch. So a split batch trains like an unsplit one.
"""

from __future__ import annotations

import torch
from torch import nn

from paralab.workload.gpt import Block, byte_workload, language_model
from paralab.workload.workload import Workload


class Experts(nn.Module):
    """Feed-forward networks for single tokens. Dim 0 of each parameter is the expert, so every
    parameter gets a gradient even if no token chooses an expert.

    `ep` runs this module on other ranks' tokens, with some of the experts
    (`paralab.worker.sharding.split_experts`)."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, dim, 4 * dim))
        self.down = nn.Parameter(torch.empty(experts, 4 * dim, dim))

    def forward(
        self, tokens: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """Add the outputs of each token's `chosen` experts, weighted by their scores."""
        output = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            hidden = nn.functional.gelu(tokens[rows] @ up)
            weighted = (hidden @ down) * scores[rows, places, None]
            output = output.index_add(0, rows, weighted.to(output.dtype))
        return output


class Routed(nn.Module):
    """A gate and the experts among which it chooses."""

    def __init__(self, dim: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(dim, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.gate(tokens).softmax(-1).topk(self.chosen)
        scores = scores / scores.sum(-1, keepdim=True)
        return self.experts(tokens, chosen, scores).view_as(x)  # type: ignore[no-any-return]


class ExpertBlock(Block):
    def __init__(self, dim: int, heads: int, experts: int, chosen: int) -> None:
        super().__init__(dim, heads)
        self.feed_forward = Routed(dim, experts, chosen)


def build(
    name: str, *, dim: int, layers: int, heads: int, experts: int, chosen: int, **data: int
) -> Workload:
    def model() -> nn.Module:
        blocks = [ExpertBlock(dim, heads, experts, chosen) for _ in range(layers)]
        model = language_model(blocks, dim, data["context"])
        for module in model.modules():
            if isinstance(module, Routed):
                # Keep scores far apart, so that rounding rarely changes which experts are chosen.
                nn.init.normal_(module.gate.weight, std=dim**-0.5)
        return model

    return byte_workload(name, model, dim, **data)
