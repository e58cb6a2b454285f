"""Lossy training: what a run resumes, averages, sends, and refuses."""

import pytest

from tests.conftest import run_paralab
from tests.parity.proofs import verify

pytestmark = pytest.mark.processes

FILE = """
import torch
from torch import nn

class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, h):
        with torch.no_grad():
            self.mean.lerp_(h.mean(0).float(), 0.1)
        return h

def workload(lr=0.1, momentum=0.9):
    "15 samples = 8 + 7; the last batch has 1, so the second rank has none."
    model = lambda: nn.Sequential(nn.Linear(4, 8), Mean(), nn.Dropout(0.2), nn.Linear(8, 2))
    sgd = lambda parameters: torch.optim.SGD(parameters, lr, momentum)
    decay = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    data = torch.randn(31, 4), torch.randn(31, 2)
    return {"model": model, "data": data, "loss": nn.functional.mse_loss, "batch_size": 15,
            "optimizer": sgd, "scheduler": decay}

def plain():
    "Nothing but gradients and parameters, so averaging every step is what ddp does."
    model = lambda: nn.Linear(4, 2)
    sgd = lambda parameters: torch.optim.SGD(parameters, 0.1)
    return workload() | {"model": model, "optimizer": sgd, "scheduler": None}
"""
DILOCO = ("--sync-every", "3", "--outer-lr", "0.7", "--outer-momentum", "0.9")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file.py").write_text(FILE)
    return tmp_path


def train(folder, strategy, steps, *options):
    command = ("run", strategy, "--workload", "file.py:workload", "--steps", str(steps))
    return run_paralab(*command, "--json", *options, cwd=folder)


def test_a_run_stopped_between_two_averages_resumes_bit_for_bit(folder):
    """Step 5 is between the averages after steps 3 and 6. In fp16, every rank has its own scale."""
    torch = pytest.importorskip("torch")
    options = (*DILOCO, "--precision", "fp16", "--save-weights")
    saving = ("--checkpoint", "saved", "--checkpoint-every", "5")
    whole = train(folder, "local-sgd", 8, *options, *saving).json
    (folder / "saved" / "step-00000008").rename(folder / "done")

    resumed = train(folder, "local-sgd", 8, *options, "--checkpoint", "saved", "--resume").json
    assert resumed["losses"] == whole["losses"][5:]
    ours, theirs = (
        torch.load(folder / each["run_folder"] / "weights.pt", weights_only=True)
        for each in (resumed, whole)
    )
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    # Averages after steps 3, 6, and 8: all-reduces of the parameters, and broadcasts of one buffer
    assert whole["all_reduces_per_step"] < 1
    assert whole["broadcasts_per_step"] == whole["all_reduces_per_step"] > 0


def test_what_is_far_from_a_single_device_and_what_is_not(folder):
    """With plain SGD, averaging parameters after each step is averaging gradients."""
    proof = verify(folder, ["file.py:plain"], "local-sgd", replicas=3, sync_every=1, accumulate=1)
    for case in proof["configurations"]:
        assert case["as_simulated"]
        assert not case["equal"]  # it is a different algorithm, no matter how small the difference
        assert case["excused"]["max_difference"] <= 1e-10
    assert proof["passed"]


def test_a_gradient_beyond_fp16_ends_the_run(folder):
    text = FILE.replace('"loss": nn.functional.mse_loss', '"loss": lambda y, t: 1e8 * y.mean()')
    (folder / "file.py").write_text(text)
    done = train(folder, "ddp", 2, "--compress", "fp16")
    assert done.code == 1
    assert "--compress bf16" in done.out
