"""Tensor parallelism: dropout, checkpoints that any strategy can read, memory, and refusals."""

import json

import pytest

from tests.conftest import run_paralab

pytestmark = pytest.mark.processes

DROPOUT = """
import torch
from torch import nn
F = nn.functional

class Block(nn.Module):
    "Attention with fused q, k, and v, a number of heads, and dropout inside and outside its heads."
    def __init__(self, dropout):
        super().__init__()
        self.heads, self.width, self.dropout = 4, 16, dropout
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split(self.width, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, 4)).transpose(1, 2) for t in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return x + self.drop(self.out(heads.transpose(1, 2).flatten(2)))

class Tied(nn.Sequential):
    "A language model without dropout, whose embedding and head share their weight."
    def __init__(self):
        super().__init__(nn.Embedding(64, 16), Block(0.0), nn.Linear(16, 64))
        self[2].weight = self[0].weight

def without_dropout():
    words = torch.randint(64, (32, 6))
    loss = lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())
    return workload() | {"model": Tied, "data": (words, words.flip(1)), "loss": loss}

def workload(dropout=0.3):
    data = torch.randn(32, 6, 16)
    model = lambda: nn.Sequential(Block(dropout), Block(dropout), nn.Linear(16, 16))
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    return {"model": model, "data": (data, data.flip(1)), "loss": F.mse_loss, "optimizer": adam,
            "batch_size": 8}
"""
COMMON = ("--workload", "block.py:workload", "--precision", "fp64", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tp")
    (folder / "block.py").write_text(DROPOUT)
    return folder


def train(folder, strategy, steps, *options):
    command = ("run", strategy, *COMMON, "--steps", str(steps), "--save-weights", *options)
    return run_paralab(*command, cwd=folder).json


def weights_of(folder, result):
    torch = pytest.importorskip("torch")
    return torch.load(folder / result["run_folder"] / "weights.pt", weights_only=True)


@pytest.fixture(scope="module")
def straight(folder):
    return train(folder, "tp", 4)


@pytest.fixture(scope="module")
def saved(folder):
    return train(folder, "tp", 2, "--checkpoint", "saved")


def test_a_resumed_run_repeats_the_interrupted_one_with_dropout(folder, straight, saved):
    """Training is bit-for-bit equal, because the shards' random streams follow from the common
    one."""
    resumed = train(folder, "tp", 4, "--checkpoint", "saved", "--resume")
    assert resumed["losses"] == straight["losses"][2:]
    ours, theirs = weights_of(folder, resumed), weights_of(folder, straight)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert ours["0.qkv.weight"].shape == (48, 16)


def test_another_strategy_continues_from_its_checkpoint(folder):
    """Without dropout, two steps of tp followed by two steps of one device equal four steps of
    one device. The embedding and the head are split together."""
    quiet = ("--workload", "block.py:without_dropout")
    train(folder, "tp", 2, "--checkpoint", "handed-over", *quiet)
    resumed = train(folder, "single", 4, "--checkpoint", "handed-over", "--resume", *quiet)
    ours, theirs = (
        weights_of(folder, resumed),
        weights_of(folder, train(folder, "single", 4, *quiet)),
    )
    for name, weight in theirs.items():
        assert float((ours[name] - weight).abs().max()) <= 1e-10, name


def test_memory_and_all_reduces_of_a_rank(straight):
    """In two blocks, forward and backward sum once per group. A replicated Linear, the norms, and
    the rows' biases are complete on every rank."""
    split = 2 * (16 * 48 + 48 + 16 * 16)
    rest = 2 * (16 + 2 * 16) + 16 * 16 + 16
    for memory in straight["peak_bytes"]:
        assert memory["parameters"] == 8 * (split // 2 + rest)
        assert memory["gradients"] == memory["parameters"]
    assert straight["all_reduces_per_step"] == 4
    units = [bucket["unit"] for bucket in straight["metrics"]["buckets"]]
    assert units == ["activations"] * 2 + ["gradients"] * 2  # all four were called gradients
    assert straight["batch"]["size"] == 8
    assert len(straight["losses"]) == 4


def test_a_gradscaler_scales_split_and_replicated_gradients(folder):
    """GradScaler unscales in one call, which torch refuses for split and plain parameters
    together. Here, the first steps overflow."""
    options = ("--workload", "block.py:workload", "--steps", "3", "--json")
    scale = ("--precision", "fp16", "--loss-scale", "1e38")
    result = run_paralab("run", "tp", *options, *scale, cwd=folder).json
    assert result["status"] == "completed"
    assert result["skipped_steps"]


def test_the_plan_is_typed_and_uneven_heads_are_refused(folder):
    plan = run_paralab("plan", "tp", *COMMON, cwd=folder).json
    groups = plan["tensor_plan"]["groups"]
    assert [group["kept"] for group in groups] == [True, True]
    assert groups[0]["columns"] == ["0.qkv"]
    assert groups[0]["parts"] == 3
    assert dict(groups[0]["divided"]) == {"0.heads": 2, "0.width": 8}
    assert any("dropout" in difference for difference in plan["differences"])

    refused = run_paralab("plan", "tp", "--shards", "3", *COMMON, cwd=folder)
    assert refused.code == 2
    assert "4 heads cannot be split over 3 shards" in json.loads(refused.out)["error"]
