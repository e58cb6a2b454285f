"""Models with experts that `ep` divides, and models that it must refuse."""

import torch
from torch import nn
from torch.nn import functional as F

from paralab.workload.workload import Workload

X = torch.randn(40, 6, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 3


class Experts(nn.Module):
    """It skips experts without tokens, so a rank whose experts get none uses neither parameters nor
    tokens."""

    def __init__(self, experts, dropout=0.0):
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(0.3 * torch.randn(experts, 8, 16))
        self.bias = nn.Parameter(0.3 * torch.randn(experts, 16))
        self.down = nn.Parameter(0.3 * torch.randn(experts, 16, 8))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens, chosen, weights):
        output = torch.zeros_like(tokens)
        if chosen.ndim == 1:
            chosen, weights = chosen[:, None], weights[:, None]
        for expert in range(self.num_experts):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            if len(rows):
                hidden = torch.relu(tokens[rows] @ self.up[expert] + self.bias[expert])
                result = self.dropout(hidden) @ self.down[expert] * weights[rows, places, None]
                output = output.index_add(0, rows, result.to(output.dtype))
        return output


class Block(nn.Module):
    """`route(chosen, weights)` may change the gate's decision. `loss` balances the experts."""

    def __init__(self, experts=4, k=2, route=lambda *given: given, dropout=0.0):
        super().__init__()
        self.norm, self.gate, self.k = nn.LayerNorm(8), nn.Linear(8, experts), k
        self.route, self.drop = route, nn.Dropout(dropout)
        self.experts = Experts(experts, dropout)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        weights, chosen = scores.topk(self.k)
        used = F.one_hot(chosen, scores.shape[1]).to(scores).sum(1)
        self.loss = (scores.mean(0) * used.mean(0)).sum()
        chosen, weights = self.route(chosen, weights)
        return x + self.drop(self.experts(tokens, chosen, weights)).view_as(x)


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Balanced(Net):
    def forward(self, x):
        return super().forward(x), sum(block.loss for block in self.blocks)


class Separate(nn.Module):
    """The experts are separate modules, and the module that calls them has other parts."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(8, 4), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        outputs = [scores[..., [n]] * expert(x) for n, expert in enumerate(self.experts)]
        return self.head(sum(outputs).mean(1))


class Clipped(torch.optim.SGD):
    """It clips the global norm, to which the experts of all ranks belong."""

    def step(self, closure=None):
        own = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(own, 0.05)
        return super().step(closure)


def of(model=Net, optimizer=None, loss=F.cross_entropy, **options):
    return Workload(lambda: model(**options), (X, Y), loss, optimizer=optimizer, batch_size=7)


def first_experts(chosen, weights):
    """All tokens choose the experts of rank 0."""
    return torch.arange(chosen.shape[1]).expand_as(chosen), weights


def limited(chosen, weights):
    """Each expert takes only the first tokens in the batch."""
    place = F.one_hot(chosen, 4).sum(1).cumsum(0).gather(1, chosen)
    return chosen, weights * (place <= len(chosen) // 4)


def even():
    return of()


def three():
    return of(experts=3)


def six():
    return of(experts=6, k=3)


def one_expert():
    return of(k=1, route=first_experts)


def one_rank():
    return of(route=first_experts)


def flat():
    """One choice per token, without a dim for choices."""
    return of(k=1, route=lambda chosen, weights: (chosen[:, 0], weights[:, 0]))


def capacity():
    return of(route=limited)


def outside():
    return of(route=lambda chosen, weights: (chosen + 1, weights))


def balanced():
    return of(Balanced, loss=lambda out, target: F.cross_entropy(out[0], target) + out[1])


def separate():
    return of(Separate)


def dropout():
    return of(dropout=0.3)


def clipped():
    return of(optimizer=lambda parameters: Clipped(parameters, lr=0.5, momentum=0.9))


def adamw():
    return of(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
