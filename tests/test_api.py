"""The same from Python, also from a notebook: functions of files, functions of no file, and what is
returned."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import paralab
from tests.conftest import ROOT


def mine():
    data = torch.randn(64, 4), torch.randn(64, 2)
    return paralab.Workload(
        model=lambda: nn.Linear(4, 2), data=data, loss=nn.functional.mse_loss, batch_size=16
    )


def test_run_takes_a_function_of_a_file(tmp_path):
    result = paralab.run(mine, "dp", replicas=2, steps=3, out=tmp_path / "run")
    assert result["strategy"] == "dp"
    assert len(result["losses"]) == 3


def test_verify_returns_the_cases(tmp_path):
    proof = paralab.verify(
        mine,
        "pipeline",
        stages=1,
        micro_batches=3,
        accumulate=1,
        samples=32,
        out=tmp_path / "proof",
    )
    assert proof["passed"]
    assert [case["equal"] for case in proof["cases"]] == [True]


def test_errors_are_exceptions_with_the_cure():
    with pytest.raises(paralab.UsageError, match="Did you mean 'ddp'"):
        paralab.run("mlp", "dddp")
    with pytest.raises(paralab.UsageError, match="pass the function that returns it"):
        paralab.run(mine(), "ddp")


NOTEBOOK = """
import torch, paralab
from torch import nn
width = 8
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    def forward(self, x):
        return self.layers(x)
def cell():
    data = torch.ones(64, 4), torch.ones(64, 2)
    return dict(model=Net, data=data, loss=nn.functional.mse_loss, batch_size=16)
result = paralab.run(cell, "ddp", replicas=2, steps=4, out="run")
assert result["losses"][-1] < result["losses"][0], result
print("steps", result["steps"])
"""


def test_a_function_that_stands_in_no_file_reaches_the_ranks(tmp_path):
    pytest.importorskip(
        "cloudpickle",
        reason="functions of a notebook travel by cloudpickle: pip install cloudpickle",
    )
    done = subprocess.run(
        [sys.executable, "-"],
        input=NOTEBOOK,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "steps 4\n", done.stderr
