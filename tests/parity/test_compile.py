"""--compile: compiled blocks train like a single device without compilation, and what that costs."""

import math
import os
import shutil

import pytest

from tests.conftest import run_paralab

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not shutil.which(os.environ.get("CXX", "g++")), reason="needs a C++ compiler: g++"
    ),
]

STEPS = 5
TINY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))

def tiny():
    model = lambda: nn.Sequential(Block(), Block(), nn.Linear(8, 3))
    data = torch.randn(64, 8), torch.randint(3, (64,))
    return {"model": model, "data": data, "loss": nn.functional.cross_entropy, "batch_size": 8}
"""


def test_compiled_blocks_are_verified_and_their_cost_is_measured(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    options = ("--workload", "tiny.py:tiny", "--rounds", "1", "--steps", str(STEPS), "--json")
    found = run_paralab("compare", "ddp", "ddp --compile", *options, cwd=tmp_path).json
    eager, compiled = found["rows"]
    assert compiled["name"] == "ddp ×2 · compile"
    assert compiled["verify"]["equal"]
    assert compiled["verify"]["max_difference"] <= 1e-10

    cost = compiled["compilation"]
    assert eager["compilation"] is None
    assert cost["graphs"] >= 1
    assert (cost["calls"], cost["eager_calls"]) == (2 * 2 * STEPS, 0)  # ranks × blocks × steps
    assert cost["first_step_seconds"] > 5 * compiled["step_seconds"]["median"]
    assert cost["eager_step_seconds"] == eager["step_seconds"]["median"]
    saved = eager["step_seconds"]["median"] - compiled["step_seconds"]["median"]
    if saved > 0:
        assert cost["break_even_steps"] == math.ceil(cost["extra_seconds"] / saved)
        assert cost["unknown"] is None
    else:
        assert cost["break_even_steps"] is None
        assert cost["unknown"]
