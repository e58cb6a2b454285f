"""Models that were not written for paralab. Each one once revealed a bug."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paralab.plan.request import STRATEGIES
from paralab.plan.schedules import UNCUT
from paralab.plan.sharding import MIXED_DTYPES
from paralab.workload.load import load_workload
from tests.conftest import ROOT, run_paralab
from tests.parity.proofs import passed, verify

pytestmark = pytest.mark.processes

UNUSUAL = """
import collections, dataclasses
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

X, Y = torch.randn(160, 8), torch.randint(3, (160,))

def of(model, **fields):
    return {"model": model, "data": (X, Y), "loss": F.cross_entropy, "batch_size": 32} | fields

class Centered(nn.Linear):
    def forward(self, x):
        return super().forward(x.sub_(x.mean(1, keepdim=True)))

def in_place():
    relu = lambda: nn.ReLU(inplace=True)
    layers = lambda: (Centered(8, 16), relu(), nn.Linear(16, 16), relu(), nn.Linear(16, 3))
    return of(lambda: nn.Sequential(*layers()))

class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)

def checkpointed():
    return of(Checkpointed)

class OneBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.block = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))

def one_block():
    return of(OneBlock)

def block_of_one_rank():
    return of(OneBlock, split_points=["block.1.1", "block.5", "last"])

class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 16), nn.Linear(16, 3), nn.Dropout(0.3)
        # A replica's copy of it once had dropout when the original had none.
        self.recurrent = nn.LSTM(4, 16, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x):
        hidden = F.dropout(self.drop(torch.relu(self.a(x))), 0.2, self.training)
        return self.b(self.recurrent(hidden.unflatten(1, (4, 4)))[0][:, -1])

def dropping():
    return of(Dropping)

def dropping_summed():
    summed = lambda output, target: F.cross_entropy(output, target, reduction="sum")
    return of(Dropping, loss=summed)

@dataclasses.dataclass
class Answer:
    logits: torch.Tensor

class Answering(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        scale = torch.ones(1)  # made in the forward: must follow the precision
        return Answer(logits=self.b(torch.relu(self.a(x))) * scale)

def answering():
    return of(Answering, loss=lambda output, target: F.cross_entropy(output.logits, target))

class Shifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))  # as the positions of a vision transformer
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        output = self.b(torch.relu(self.a(x + self.shift)))
        return output, output.T  # as an LSTM's state, with the samples in dim 1

def shifting():
    return of(Shifting, loss=lambda output, target: F.cross_entropy(output[0], target))

class Ignored(nn.Module):  # as CLIP's scale of logits, if the loss uses only the embeddings
    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(8, 16), nn.Linear(16, 3), nn.Parameter(torch.ones(1))

    def forward(self, batch):
        output = self.b(torch.relu(self.a(batch["x"])))
        return output, output * self.scale

def ignored():
    optimizer = lambda parameters: torch.optim.AdamW(parameters, 1e-3)  # it decays the scale
    loss = lambda output, target: F.cross_entropy(output[0], target)
    unpack = lambda batch: (({"x": batch[0]},), batch[1])  # dp took the dict for keyword arguments
    return of(Ignored, optimizer=optimizer, loss=loss, unpack=unpack)

class Spectral(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)
        self.phase = nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.phase, n=8))

def spectral():
    return of(lambda: nn.Sequential(Spectral(), nn.Linear(3, 3)))

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, i):
        return {"x": X[i], "y": Y[i], "name": "n" * (i % 5)}

def mapping_with_names():
    def weighted(output, target):
        losses = F.cross_entropy(output, target[0], reduction="none")
        return (losses * target[1]).sum() / target[1].sum()
    def collate(items):
        return collections.UserDict(torch.utils.data.default_collate(items))
    def unpack(batch):
        weights = torch.tensor([len(name) + 1.0 for name in batch["name"]], dtype=batch["x"].dtype)
        return batch["x"], (batch["y"], weights)
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    weight = lambda batch: sum(len(name) + 1 for name in batch["name"])
    return of(model, data=Items(), collate=collate, unpack=unpack, loss=weighted, weight=weight)

def batch_norm_1d():
    layers = lambda: (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return of(lambda: nn.Sequential(*layers()))
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "unusual.py").write_text(UNUSUAL)
    return tmp_path


MODELS = ["in_place", "checkpointed", "dropping", "answering", "shifting", "mapping_with_names"]


def verified(folder, workloads, **options):
    """Return the proof and its manifest."""
    (folder / "unusual.py").write_text(UNUSUAL)
    proof = verify(folder, workloads, **options)
    return proof, json.loads((folder / proof["run_folder"] / "manifest.json").read_text())


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    # 33 = 32 + 1: at the end, one of the two ranks has no samples
    options = {"accumulate": 1, "samples": 33, "steps": 2, "replicas": 2, "micro_batches": 2}
    return verified(
        tmp_path_factory.mktemp("unusual"),
        [f"unusual.py:{name}" for name in [*MODELS, "one_block"]],
        **options,
    )


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_like_one_device(proof, name):
    found, manifest = proof
    cases = [
        case
        for case in found["configurations"]
        if case["options"]["workload"] == f"unusual.py:{name}"
    ]
    assert [case for case in cases if not passed(case)] == []
    # In `dropping`, an LSTM is between the two linear layers, so tp has nothing to split.
    refused = {"ep", "tp", "cp"} if name == "dropping" else {"ep", "cp"}
    assert {case["strategy"] for case in cases} == set(STRATEGIES) - refused
    [summary] = [
        summary for summary in manifest["workload"] if summary["name"] == f"unusual.py:{name}"
    ]
    assert summary["dropout"] == (name == "dropping")
    assert found["dropout"] != "none"


def test_cuts_that_are_refused_are_not_tried_with_every_schedule(proof):
    """One of the three cuts of `one_block` is always inside the block. A refusal ends all ranks,
    and the remaining runs need new ones. So paralab tries the same cuts only once."""
    found, manifest = proof
    refused = [case for case in found["skipped"] if UNCUT in case["reason"]]
    mine = [case for case in refused if case["options"]["workload"] == "unusual.py:one_block"]
    assert {(case["strategy"], case["options"]["schedule"]) for case in mine} >= {
        ("pipeline", "interleaved"),
        ("pipeline", "zero-bubble"),
        ("hybrid", "zero-bubble"),
    }, [case["reason"] for case in found["skipped"]]
    asked = [(case["strategy"], case["options"]) for case in refused]
    plans = [
        case["plan"]
        for case in manifest["configurations"]
        if (case["plan"]["strategy"], case["options"]) in asked
    ]
    cuts = {(plan["workload"], *(part["start"] for part in plan["stage_parts"])) for plan in plans}
    run = Path(manifest["folder"], found["run_folder"])
    untried = [case for case in run.glob("case*") if not any((case / "events").iterdir())]
    assert len(plans) == len(refused)
    assert len(refused) - len(untried) == len(cuts)


def test_a_block_that_begins_in_another_stage_of_the_same_rank_is_refused(file):
    """Rank 0 has the block's first and third parts, so it recomputes with a mix of real parameters
    and shapes. Measured cuts sometimes led to this, and the run failed with torch's own error."""
    workload = ["--workload", "unusual.py:block_of_one_rank", "--steps", "2"]
    done = run_paralab("run", "pipeline", "--schedule", "interleaved", *workload, cwd=file)
    assert done.code == 1
    assert UNCUT in done.err
    assert "meta" not in done.err


def test_dp_leaves_out_gradients_of_outputs_that_the_loss_does_not_use(file):
    """They were once zero, as if the loss used these outputs, so weight decay changed the
    parameters."""
    options = {"strategy": "dp", "accumulate": 1, "replicas": 2, "compile": None}
    proof, _ = verified(file, ["unusual.py:ignored"], **options)
    assert all(passed(case) for case in proof["configurations"])


def test_fsdp_says_that_a_unit_mixes_dtypes(file):
    """The reported reason was once an assertion in torch."""
    proof, _ = verified(file, ["unusual.py:spectral"], strategy="fsdp", accumulate=1, replicas=2)
    assert all(MIXED_DTYPES in case["cause"] for case in proof["configurations"])


def test_dropout_does_not_hide_a_mistake(file):
    done = run_paralab(
        "verify",
        "dp",
        "--workload",
        "unusual.py:dropping_summed",
        "--accumulate",
        "4",
        "--replicas",
        "2",
        cwd=file,
    )
    assert done.code == 1
    assert "DIFFERS" in done.out


@pytest.fixture(scope="module")
def batch_norms(tmp_path_factory):
    # 48 = 32 + 16
    found, _ = verified(
        tmp_path_factory.mktemp("norms"),
        ["cnn:tiny", "unusual.py:batch_norm_1d"],
        accumulate=1,
        samples=48,
        steps=2,
    )
    return found


def test_batchnorm_is_frozen_for_the_proof_and_its_difference_reported(batch_norms):
    assert batch_norms["passed"]
    cases = [
        case for case in batch_norms["configurations"] if case["options"]["workload"] == "cnn:tiny"
    ]
    split = [case for case in cases if case["strategy"] not in ("single", "mp")]
    whole = [case for case in cases if case not in split]
    assert all(case["equal"] and case["excused"] is None for case in whole)
    assert all(passed(case) and case["control"] == ["batch_norm"] for case in split)
    assert all(case["excused"]["max_difference"] > 1e-6 for case in split)
    assert all(any("running_mean" in name for name in case["excused"]["buffers"]) for case in split)
    # It has one linear layer, so tp has nothing to split.
    assert {case["strategy"] for case in cases} == set(STRATEGIES) - {"tp", "cp", "ep"}


def test_batch_norm_of_few_samples_fails_in_no_case(batch_norms):
    assert batch_norms["passed"]
    assert all(case["options"]["partial_last_batch"] for case in batch_norms["configurations"])
    assert not any("failed" in (case["cause"] or "") for case in batch_norms["configurations"])


def test_a_case_that_fails_does_not_take_the_others_with_it(file):
    """BatchNorm rejects single samples. Cases with larger micro-batches still get a verdict."""
    options = ["--accumulate", "1", "--batch-size", "6", "--samples", "18"]
    done = run_paralab(
        "verify",
        "pipeline",
        "--workload",
        "unusual.py:batch_norm_1d",
        *options,
        "--micro-batches",
        "4",
        cwd=file,
    )
    assert done.code == 1
    assert "Rank 0 failed" in done.out
    assert "more than 1 value" in done.out  # what BatchNorm raises


@pytest.fixture(scope="module")
def plain():
    """Return gpt:tiny's weights after five steps of a plain loop. (`verify` compares our loop with
    itself.)"""
    workload = load_workload("gpt:tiny")
    torch.manual_seed(7)
    model = workload.model().double()
    optimizer = workload.optimizer(model.parameters())
    x, y = workload.data
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7 * 1_000_003))
    for step in range(5):
        rows = order[step * 32 : (step + 1) * 32]
        loss = workload.loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["single", "hybrid"])
def test_it_is_what_plain_pytorch_trains(tmp_path, strategy, plain):
    options = [
        "--workload",
        "gpt:tiny",
        "--seed",
        "7",
        "--steps",
        "5",
        "--precision",
        "fp64",
        "--save-weights",
        "--out",
        "run",
    ]
    assert run_paralab("run", strategy, *options, cwd=tmp_path).code == 0
    mine = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)
    assert mine.keys() == plain.keys()
    assert max(float((mine[key] - plain[key]).abs().max()) for key in mine) < 1e-12


SCRIPT = """
import torch, paralab
def mine():
    data = torch.randn(64, 4), torch.randn(64, 2)
    model, loss = lambda: torch.nn.Linear(4, 2), torch.nn.functional.mse_loss
    return paralab.Workload(model=model, data=data, loss=loss, batch_size=16)
print(paralab.run(mine, "ddp", replicas=2, steps=3, out="run")["steps"])
"""


@pytest.mark.parametrize("cloudpickle", [True, False])
def test_a_script_that_calls_paralab_at_its_top_level_does_not_start_itself_again(
    tmp_path, cloudpickle
):
    """The script once started itself forever, because the ranks import it to find the workload."""
    (tmp_path / "script.py").write_text(SCRIPT)
    if not cloudpickle:
        (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    if cloudpickle:
        assert done.stdout == "3\n", done.stderr
    else:
        assert "if __name__" in done.stderr
