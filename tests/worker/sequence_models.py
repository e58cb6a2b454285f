"""Small models for context parallelism: some that it can split, and some whose tokens depend on each
other outside of attention. `tensor_ranks.py` proves them on two ranks."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

from paralab.errors import ParalabError
from paralab.worker.proofs.block_proof import begin_together
from paralab.worker.proofs.prove_sequence import find_sequence_plan
from paralab.worker.sharding import sequence_parts, split_sequence
from paralab.worker.sharding.split_sequence import SplitSequence
from paralab.workload.hooks import patched
from paralab.workload.sequence_plan import SplitBlock
from paralab.workload.workload import as_workload

TOKENS = 7  # 4 on one rank and 3 on the other
functional = nn.functional


class Block(nn.Module):
    """Attention with two heads, and one difficulty."""

    def __init__(self, trick):
        super().__init__()
        self.qkv, self.out, self.trick = nn.Linear(8, 24), nn.Linear(8, 8), trick
        self.norm = nn.BatchNorm1d(8) if trick == "batch norm" else nn.LayerNorm(8)
        self.steps = nn.Parameter(torch.randn(TOKENS, 8))

    def forward(self, x, scale, mask=None):
        trick = self.trick
        if trick == "position":
            x = x + self.steps[: x.shape[1]]
        if trick == "one rank" and x.shape[1] == 3:
            raise ValueError("three tokens")
        if trick == "noise":
            x = x + torch.randn(())
        if trick == "mean":
            x = x + x.mean(1, keepdim=True)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) if trick == "batch norm" else self.norm(x)
        heads = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if trick == "manual":
            query, key, value = heads
            attended = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        else:
            attended = functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        return x * scale + self.out(attended.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Embeds, calls two blocks with a trained scale, and projects."""

    def __init__(self, trick):
        super().__init__()
        self.trick, self.embedding, self.head = trick, nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(trick) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(8))
        if trick == "tied":
            self.blocks[0].out.weight = self.embedding.weight

    def forward(self, x):
        mask = None
        if self.trick == "mask of each head":
            mask = torch.randn(2, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0))[None]
        x = self.embedding(x)
        first = self.blocks[0](x, self.scale, mask)
        second = self.blocks[1](first, self.scale, mask)
        return self.head(second + first if self.trick == "skip" else second)


TRICKS = "plain|skip|mask of each head|position|one rank|noise|mean|batch norm|manual|tied".split(
    "|"
)


def prove(trick):
    data = torch.randn(4, TOKENS, 8, generator=torch.Generator().manual_seed(0))
    workload = {"model": lambda: Net(trick), "data": (data, data), "loss": functional.mse_loss}
    plan = find_sequence_plan(as_workload(workload, trick), 2)
    torch.set_default_dtype(torch.float32)
    return asdict(plan)


def another_argument():
    """A block that gets a mask in training, but did not get one in the proof."""
    block = Block("plain")
    split = SplitBlock("", arguments=(2,), attention=1, cut=((0, 1),), gathered=((0, 1),))
    SplitSequence(block, (split,), None, begin_together, begin_together)
    with pytest.raises(ParalabError) as refused:
        block(torch.randn(2, TOKENS, 8), torch.randn(8), torch.randn(TOKENS, TOKENS))
    return {"problem": refused.value.problem}


def results():
    plans = {trick: prove(trick) for trick in TRICKS} | {"another argument": another_argument()}
    with patched(split_sequence, sum_gradients=lambda *_: None):
        plans["parameters not summed"] = prove("plain")
    with patched(split_sequence.SplitSequence, _attend=lambda self, attention: attention):
        plans["attention to a part"] = prove("plain")
    with patched(sequence_parts.Ranks, copy=lambda self, tensor: tensor):
        plans["arguments not summed"] = prove("plain")
    with patched(sequence_parts.Ranks, own_part=lambda self, whole, dim: whole.narrow(dim, 0, 4)):
        plans["wrong part"] = prove("plain")
    return plans
