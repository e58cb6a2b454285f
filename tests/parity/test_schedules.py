"""One process per pipeline stage: models that `verify all` does not cover. (It verifies every
schedule on mlp and gpt.)"""

import json

import pytest

from paralab.plan.schedules import WITHOUT
from tests.conftest import run_paralab

pytestmark = pytest.mark.processes

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        return x + torch.tanh(self.linear(x)) * mask

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Tanh()  # the last part has no parameters
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        mask = x.sum(1, keepdim=True) > 0  # not a float: sent without a gradient
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.last(x)

def lengths(n):
    "Batches of different lengths: the shapes of what is sent change from step to step."
    x = torch.randn(n, int(torch.randint(1, 4, ())), 8)
    return x, x.mean(1).square()

def masked():
    data = torch.randn(64, 8), torch.randn(64, 8)
    return {"model": Masked, "data": data, "loss": F.mse_loss, "batch_size": 13}

def varying():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

        def forward(self, x):
            return self.net(x)

    loss = lambda output, target: F.mse_loss(output.mean(1), target)
    return {"model": Mean, "data": lengths, "loss": loss, "batch_size": 12}

class Grow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2e5

class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.second(Grow.apply(self.first(x))))

def growing():
    "In fp16 the gradients of the first stage overflow, those of the second do not."
    return {
        "model": Growing,
        "data": (torch.randn(64, 8), torch.randn(64, 8)),
        "loss": lambda output, target: F.mse_loss(output.float(), target),
        "batch_size": 16,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-9),
        "split_points": ["second"],
    }
"""


RELATIVE = """
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, positions):
        weights = torch.softmax(self.query(x) @ self.key(positions).T, -1)
        return x + weights @ self.query(positions)

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.norm = nn.Embedding(8, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        positions = self.norm(self.positions.weight)  # depends only on parameters
        for layer in self.layers:
            x = layer(x, positions)
        return x

def workload():
    linear = lambda: nn.Linear(16, 16)
    model = lambda: nn.Sequential(linear(), nn.Tanh(), Encoder(), linear(), nn.Tanh(), linear())
    return {"model": model, "data": (torch.randn(32, 16),) * 2, "loss": F.mse_loss}
"""


def test_a_backward_pass_that_torch_cannot_divide_is_named(tmp_path):
    """zero-bubble failed on DeBERTa inside torch, and `verify all` once called that a
    difference."""
    (tmp_path / "own.py").write_text(RELATIVE)
    words = ["run", "pipeline", "--schedule", "zero-bubble", "--workload", "own.py:workload"]
    done = run_paralab(*words, "--steps", "1", cwd=tmp_path)
    assert done.code == 1
    assert "--schedule interleaved" in done.err
    assert WITHOUT in done.err  # so `verify all` does not run it


@pytest.mark.parametrize(
    ("strategy", "schedule", "model", "options"),
    [
        # 30 samples = 13 + 13 + 4 over 3 micro-batches
        ("pipeline", "zero-bubble", "masked", ["--stages", "3", "--samples", "30"]),
        ("hybrid", "interleaved", "varying", ["--steps", "6"]),
    ],
)
def test_models_that_are_not_sequences_of_layers(tmp_path, strategy, schedule, model, options):
    (tmp_path / "models.py").write_text(MODELS)
    options += ["--accumulate", "1", "--micro-batches", "3", "--json"]
    found = run_paralab(
        "verify",
        strategy,
        "--schedule",
        schedule,
        "--workload",
        f"models.py:{model}",
        *options,
        cwd=tmp_path,
    ).json
    assert found["configurations"]
    assert all(case["equal"] for case in found["configurations"]), found["configurations"]


def test_all_stages_skip_the_same_steps_and_the_weights_are_gathered(tmp_path):
    import torch

    (tmp_path / "models.py").write_text(MODELS)
    options = [
        "--schedule",
        "1f1b",
        "--workload",
        "models.py:growing",
        "--precision",
        "fp16",
        "--loss-scale",
        "256",
        "--steps",
        "8",
    ]
    found = run_paralab(
        "run", "hybrid", *options, "--save-weights", "--out", "run", "--json", cwd=tmp_path
    ).json
    events = [
        [
            json.loads(line)
            for line in (tmp_path / f"run/events/rank{rank}.jsonl").read_text().splitlines()
        ]
        for rank in range(4)
    ]
    skipped = [[event["skipped"] for event in rank if event["event"] == "step"] for rank in events]
    assert skipped[0][0]
    assert not skipped[0][-1]
    assert all(rank == skipped[0] for rank in skipped)
    bad = [
        next(event["not_finite"] for event in rank if event["event"] == "gradients")
        for rank in events
    ]
    # Without agreement, the second stages would have taken the step.
    assert [number > 0 for number in bad] == [True, False, True, False]
    assert found["samples_per_step"] == 16  # the warning appears once, not once per stage
    state = torch.load(tmp_path / "run/weights.pt", weights_only=True)
    assert list(state) == [
        f"{layer}.{kind}" for layer in ("first", "second", "last") for kind in ("weight", "bias")
    ]
    assert not any(value.is_meta for value in state.values())
