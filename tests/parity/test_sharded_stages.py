"""ZeRO stages in a pipeline: FSDP × PP, FSDP × PP × TP, and ZeRO-1 in both pipelines."""

import json

import pytest
import torch

from paralab.plan.sharding import BRANCHES
from tests.conftest import run_paralab
from tests.parity.proofs import verify

pytestmark = pytest.mark.processes

GRID = "hybrid --replicas 2 --stages 2"
KINDS = ("parameters", "gradients", "optimizer")
NAMES = {
    "plain": f"{GRID} --schedule 1f1b",
    "ZeRO-1": f"{GRID} --zero 1",
    "ZeRO-1, processes": f"{GRID} --zero 1 --schedule gpipe",
    "ZeRO-2": f"{GRID} --zero 2",
    "ZeRO-3": f"{GRID} --zero 3",
    "ZeRO-2, zero-bubble": f"{GRID} --zero 2 --schedule zero-bubble",
    "ZeRO-3, interleaved": f"{GRID} --zero 3 --schedule interleaved --accumulate 2",
    "ZeRO-3, shards": f"{GRID} --zero 3 --shards 2 --micro-batches 2",
    "ZeRO-1, shards": "hybrid --replicas 2 --stages 1 --shards 2 --zero 1",
    "bf16": f"{GRID} --zero 3 --precision bf16",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Run one comparison, which also verifies each configuration in fp64. Return its rows."""
    folder = tmp_path_factory.mktemp("stages")
    common = ["--workload", "gpt:tiny", "--steps", "2", "--rounds", "1", "--json"]
    found = run_paralab("compare", *NAMES.values(), *common, cwd=folder).json
    return dict(zip(NAMES, found["rows"], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_like_one_device(rows, name):
    assert rows[name]["verify"]["equal"], rows[name]["verify"]["cause"]
    assert rows[name]["verify"]["tolerance"] == 1e-10
    assert rows[name]["loss_difference"] <= (0.02 if name == "bf16" else 1e-5)


def bytes_of(row, kind):
    """Return the bytes on all ranks together."""
    return sum(memory[kind] for memory in row["peak_bytes"])


def test_each_zero_stage_shards_more(rows):
    """With two replicas, all ranks together hold what is sharded once instead of twice."""
    shares = {
        name: [round(bytes_of(rows[name], k) / bytes_of(rows["plain"], k), 1) for k in KINDS]
        for name in ("ZeRO-1", "ZeRO-1, processes", "ZeRO-2", "ZeRO-3")
    }
    assert shares == {  # parameters, gradients, optimizer state
        "ZeRO-1": [1.0, 1.0, 0.5],
        "ZeRO-1, processes": [1.0, 1.0, 0.5],
        "ZeRO-2": [0.5, 0.5, 0.5],
        "ZeRO-3": [0.5, 0.5, 0.5],
    }
    whole = bytes_of(rows["plain"], "parameters")
    assert bytes_of(rows["ZeRO-2"], "gathered") == whole
    assert bytes_of(rows["ZeRO-3"], "gathered") < whole
    assert bytes_of(rows["ZeRO-3"], "unreduced") == whole
    activations = {bytes_of(rows[name], "activations") for name in ("plain", "ZeRO-2", "ZeRO-3")}
    assert len(activations) == 1
    # In bf16, gathered parameters are half as large, and autograd does not keep copies of them.
    assert bytes_of(rows["bf16"], "gathered") == bytes_of(rows["ZeRO-3"], "gathered") / 2


def test_what_is_communicated_and_how_often(rows):
    """ZeRO-3 gathers each unit twice for each of 4 micro-batches, ZeRO-2 once per step. (All
    parameters of gpt:tiny's first stage are in units.)"""
    gathers = {name: rows[name]["all_gathers_per_step"] for name in ("ZeRO-2", "ZeRO-3")}
    reduced = {name: rows[name]["reduce_scatters_per_step"] for name in gathers}
    assert reduced["ZeRO-2"] == reduced["ZeRO-3"] == gathers["ZeRO-2"]
    assert gathers["ZeRO-3"] == 4 * 2 * gathers["ZeRO-2"]
    assert rows["ZeRO-1, processes"]["broadcasts_per_step"] == 2


def test_the_grid_is_printed_and_the_estimate_is_near(tmp_path):
    words = ["run", *GRID.split(), "--zero", "3", "--workload", "gpt:tiny", "--steps", "2"]
    done = run_paralab(*words, "--out", "run", cwd=tmp_path)
    assert [line.split() for line in done.out.splitlines() if line.startswith("replica ")] == [
        ["replica", "0", "rank", "0,", "cpu:0", "rank", "1,", "cpu:1"],
        ["replica", "1", "rank", "2,", "cpu:2", "rank", "3,", "cpu:3"],
    ]
    axes = [line.split("  ")[0] for line in done.out.splitlines()]
    assert {"replicas", "stages"} <= set(axes)
    assert "all-gather, reduce-scatter" in done.out

    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    estimates = manifest["plan"]["memory"]["devices"]
    for rank, each in enumerate(estimates):
        lines = (tmp_path / "run" / "events" / f"rank{rank}.jsonl").read_text().splitlines()
        measured = [e for e in map(json.loads, lines) if e["event"] == "memory"][-1]
        for kind in (*KINDS, "gathered", "unreduced"):
            assert each[kind] == pytest.approx(measured[kind], rel=0.02), (rank, kind)
        assert each["activations"] == pytest.approx(measured["activations"], rel=0.2)


STUBBORN = """
import torch
from torch import nn
F = nn.functional

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        inner = F.dropout(torch.relu(self.up(x)), 0.2, self.training)
        return x + self.scale * self.down(inner)

class Net(nn.Module):
    "Frozen and unused layers, an LSTM, a norm, and weights that are tied within a stage."
    def __init__(self):
        super().__init__()
        self.first = Block().requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.recurrent = nn.BatchNorm1d(8), nn.LSTM(8, 8, batch_first=True)
        self.middle, self.tied, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.tied.weight = self.middle.weight
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x, _ = self.recurrent(self.norm(x)[:, None])
        return self.head(self.tied(torch.tanh(self.middle(x[:, 0]))))

def workload():
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    return {"model": Net, "data": (x, y), "loss": F.cross_entropy, "optimizer": adam,
            "batch_size": 13, "split_points": ["recurrent"]}

def frozen_stage():
    return workload() | {"split_points": ["blocks.0"]}

def no_parameters():
    layers = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3), nn.LogSoftmax(1))
    return workload() | {"model": layers, "split_points": ["3"]}

class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.ones(1 + 7 * i % 11, 8) / (i + 1), i % 3

class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).sum(1))

class Branches(nn.Module):
    "Replicas with 7 and 6 samples have micro-batches of 4 and 3."
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.extra = nn.Linear(8, 8)

    def forward(self, x):
        x = self.last(self.middle(self.first(x)))
        return x if len(x) == 3 else self.extra(x)

def branches():
    return workload() | {"model": Branches, "split_points": ["middle"]}

def lengths():
    "Each rank pads its own samples, so a shape may be new to only one replica."
    def collate(items):
        x, y = zip(*items)
        return nn.utils.rnn.pad_sequence(x, batch_first=True), torch.tensor(y)
    return workload() | {"model": Pooled, "data": Sequences(), "collate": collate,
                         "split_points": ["last"]}
"""


def test_stubborn_models(tmp_path):
    """A stage may have only frozen parameters, or none."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    models = ("workload", "frozen_stage", "no_parameters", "lengths")
    names = [f"stubborn.py:{name}" for name in models]
    grid = {"replicas": 2, "stages": 2, "micro_batches": 2, "accumulate": 2, "samples": 41}
    found = verify(tmp_path, names, "hybrid", zero=3, compile=None, **grid)
    assert [case["equal"] for case in found["configurations"]] == [True] * 4, found


def test_replicas_that_take_different_branches_are_reported(tmp_path):
    """One of them finds out in a backward pass, whose errors torch wraps."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    words = ["--zero", "3", "--workload", "stubborn.py:branches", "--micro-batches", "2"]
    done = run_paralab("run", *GRID.split(), *words, "--steps", "2", cwd=tmp_path)
    assert done.code == 1
    assert BRANCHES in done.err
    assert "Traceback" not in done.err


def test_other_layouts_continue_from_a_checkpoint(tmp_path):
    """One step each of two grids and of one device equal three steps of one device."""
    common = ["--workload", "mlp:tiny", "--precision", "fp64", "--save-weights", "--json"]
    losses = []
    for steps, strategy in enumerate((f"{GRID} --zero 3", f"{GRID} --zero 1", "single"), start=1):
        words = ["run", *strategy.split(), *common, "--checkpoint", "saved", "--steps", f"{steps}"]
        done = run_paralab(*words, *["--resume"][: steps - 1], cwd=tmp_path).json
        losses += done["losses"]
    straight = run_paralab("run", "single", *common, "--steps", "3", cwd=tmp_path).json
    assert losses == pytest.approx(straight["losses"], abs=1e-12)
    ours, theirs = (
        torch.load(tmp_path / result["run_folder"] / "weights.pt", weights_only=True)
        for result in (done, straight)
    )
    for name, weight in theirs.items():
        assert float((ours[name] - weight).abs().max()) <= 1e-10, name
