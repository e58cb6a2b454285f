"""Recomputation gives the same training in less memory, with every strategy."""

import pytest

from tests.conftest import run_paralab
from tests.parity.proofs import verify

pytestmark = pytest.mark.processes

STRATEGIES = ("ddp", "fsdp", "pipeline", "pipeline --schedule 1f1b")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    asked = [
        f"{strategy}{option}"
        for strategy in STRATEGIES
        for option in ("", " --recompute selective", " --recompute full")
    ]
    options = ("--workload", "gpt:tiny", "--steps", "4", "--rounds", "1", "--json")
    folder = tmp_path_factory.mktemp("recompute")
    return run_paralab("compare", *asked, *options, cwd=folder).json["rows"]


def activations(row):
    return max(memory["activations"] for memory in row["peak_bytes"])


@pytest.mark.parametrize("place", range(len(STRATEGIES)), ids=STRATEGIES)
def test_each_mode_needs_less_memory_for_the_same_training(rows, place):
    plain, selective, full = rows[3 * place : 3 * place + 3]
    assert activations(full) < 0.7 * activations(plain)
    assert activations(full) < activations(selective) < activations(plain)
    assert selective["verify"]["equal"]
    assert full["verify"]["equal"]
    assert {len(row["peak_bytes"]) for row in (plain, selective, full)} == {2}


DROPPING = """
import random, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(16, 16), nn.Dropout(0.4)

    def forward(self, x):
        return x + torch.tanh(self.drop(self.layer(x)))

class Noisy(Block):
    def forward(self, x):
        return super().forward(x) * (1 + random.random())

def dropping(Block=Block):
    model = lambda: nn.Sequential(*[Block() for _ in range(4)], nn.Linear(16, 3))
    data = torch.randn(96, 16), torch.randint(3, (96,))
    loss = nn.functional.cross_entropy
    return {"model": model, "data": data, "loss": loss, "batch_size": 12, "split_points": ["2"]}

def noisy():
    return dropping(Noisy)

class Gaussian(Block):
    def forward(self, x):
        return torch.tanh(super().forward(x) * (1 + torch.randn_like(x)))

def gaussian():
    return dropping(Gaussian)
"""


@pytest.mark.parametrize(
    ("workload", "strategy"),
    [("dropping", "dp"), ("noisy", "ddp"), ("noisy", "pipeline --schedule 1f1b")],
)
def test_the_random_numbers_of_training_stay_the_same(tmp_path, workload, strategy):
    torch = pytest.importorskip("torch")
    (tmp_path / "dropping.py").write_text(DROPPING)
    fixed = ["--workload", f"dropping.py:{workload}", "--steps", "3", "--save-weights", "--json"]

    def weights(*more):
        words = ["run", *strategy.split(), *fixed, "--precision", "fp64", *more]
        folder = run_paralab(*words, cwd=tmp_path).json["run_folder"]
        return torch.load(tmp_path / folder / "weights.pt", weights_only=True)

    plain, again = weights(), weights("--recompute", "full")
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_verification_repeats_the_draws_of_each_sample(tmp_path):
    """The model draws per sample, and the backward pass must repeat the same draws."""
    (tmp_path / "dropping.py").write_text(DROPPING)
    options = {"accumulate": 1, "samples": 30, "replicas": 2, "recompute": "full"}
    proof = verify(tmp_path, ["dropping.py:gaussian"], "ddp", **options)
    [case] = proof["configurations"]
    assert case["control"] == ["random"]
    assert case["equal"]
