"""Grids of replicas × stages × shards: mistakes along an axis are caught, and runs resume exactly.
(`verify all` proves the built-in workloads on 2 × 2 × 2 ranks.)"""

import shutil

import pytest

from tests.conftest import run_paralab
from tests.parity.proofs import verify

pytestmark = pytest.mark.processes

BROKEN = """
import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from paralab.worker.strategies import pipeline_processes
from paralab.workload.hooks import patched

def net():
    block = lambda: (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    return {
        "model": lambda: nn.Sequential(*block(), *block()),
        "data": (torch.randn(128, 4), torch.randn(128, 4)),
        "loss": nn.functional.mse_loss,
        "batch_size": 15,
    }

def patch(name, broken):
    "Replace a function in trainings of the workload `broken` is named after."
    original = getattr(pipeline_processes, name)
    def function(context, *args):
        mine = context.plan.workload.endswith(broken.__name__)
        return broken(context, *args) if mine else original(context, *args)
    setattr(pipeline_processes, name, function)

def no_sum_over_replicas():
    def no_sum_over_replicas(context, parameters):
        pass
    patch("sum_over_replicas", no_sum_over_replicas)
    return net()

def doubled_sum_over_shards():
    def doubled_sum_over_shards(context):
        "Backward, the gradient of a group's input counts twice, on all shards alike."
        add = functional.all_reduce
        def all_reduce(tensor, *args, **more):
            return add(tensor, *args, **more) * (1 if torch.is_grad_enabled() else 2)
        return patched(functional, all_reduce=all_reduce)
    patch("running_shards", doubled_sum_over_shards)
    return net()
"""


def test_a_wrong_sum_along_an_axis_is_caught(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    mistakes = "no_sum_over_replicas", "doubled_sum_over_shards"
    names = [f"broken.py:{name}" for name in (*mistakes, "net")]
    grid = {"replicas": 2, "stages": 2, "shards": 2, "micro_batches": 2, "accumulate": 1}
    found = verify(tmp_path, names, "hybrid", samples=30, compile=None, **grid)
    replicas, shards, right = found["configurations"]
    assert right["equal"], right
    assert not replicas["equal"]
    assert "synchronization" in replicas["cause"]
    assert not shards["equal"]
    assert shards["gradient_difference"] > 1e-3


DROPOUT = """
import torch
from torch import nn
F = nn.functional

class Block(nn.Module):
    "Dropout inside and outside the part that each shard computes on its own."
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        inner = F.dropout(F.relu(self.up(self.norm(x))), 0.3, self.training)
        return x + F.dropout(self.down(inner), 0.3, self.training)

def workload():
    data = torch.randn(32, 8)
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    return {"model": lambda: nn.Sequential(Block(), Block(), nn.Linear(8, 8)),
            "data": (data, data.flip(1)), "loss": F.mse_loss, "optimizer": adam, "batch_size": 8}
"""


@pytest.mark.parametrize(
    "grid",
    [
        ["--replicas", "1", "--stages", "2", "--shards", "2"],
        ["--replicas", "2", "--stages", "1", "--shards", "2", "--zero", "3"],
        ["--replicas", "2", "--stages", "2", "--zero", "3"],
    ],
    ids=["stages and shards", "sharded replicas and shards", "sharded stages"],
)
def test_a_resumed_run_repeats_the_interrupted_one_with_dropout(tmp_path, grid):
    (tmp_path / "net.py").write_text(DROPOUT)
    common = ["--workload", "net.py:workload", "--precision", "fp64", "--steps", "3", "--json"]
    common += ["--checkpoint", "saved", "--save-weights", *grid]
    every = ["--checkpoint-every", "1", "--keep-checkpoints", "3"]
    straight = run_paralab("run", "hybrid", *common, *every, cwd=tmp_path).json
    shutil.rmtree(tmp_path / "saved" / "step-00000003")
    resumed = run_paralab("run", "hybrid", *common, "--resume", cwd=tmp_path).json

    assert resumed["losses"] == straight["losses"][2:]
    assert len(straight["losses"]) == 3
    import torch

    ours, theirs = (
        torch.load(tmp_path / result["run_folder"] / "weights.pt", weights_only=True)
        for result in (resumed, straight)
    )
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert ours["0.up.weight"].shape == (16, 8)
