"""FSDP: memory per rank, what is communicated and when, and models that are hard to shard."""

import json
from pathlib import Path

import pytest

from tests.conftest import run_paralab

pytestmark = pytest.mark.processes

UNITS = 5  # of mlp:tiny: four layers of one width, and the classifier
LARGEST = 16 * (16 + 1) * 4  # bytes of one of the four


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Rows by name and the run folder of one comparison: ddp, and fsdp on 1, 2, and 4 ranks, with
    and without accumulation."""
    folder = tmp_path_factory.mktemp("sharded")
    fsdp = [f"fsdp --replicas {ranks}" for ranks in (1, 2, 4)]
    passes = [
        "fsdp --accumulate 4",
        "fsdp --accumulate 4 --sync-every-pass",
        "fsdp --precision bf16",
        "fsdp --precision fp16",
    ]
    common = ["--workload", "mlp:tiny", "--steps", "4", "--rounds", "1", "--json"]
    found = run_paralab("compare", "ddp --replicas 2", *fsdp, *passes, *common, cwd=folder).json
    return {row["name"]: row for row in found["rows"]}, folder / found["run_folder"]


def most_bytes(row, *kinds):
    """The most bytes of these kinds on any rank."""
    return max(sum(memory[kind] for kind in kinds) for memory in row["peak_bytes"])


def test_memory_per_rank_falls_with_the_ranks(table):
    rows, _ = table
    sharded = ("parameters", "gradients", "optimizer")
    whole = most_bytes(rows["ddp ×2"], *sharded)
    assert most_bytes(rows["fsdp ×1"], *sharded) == whole
    assert most_bytes(rows["fsdp ×2"], *sharded) == pytest.approx(whole / 2, rel=0.05)
    assert most_bytes(rows["fsdp ×4"], *sharded) == pytest.approx(whole / 4, rel=0.05)
    # Autograd saves the same: gathered parameters do not count as activations.
    assert most_bytes(rows["fsdp ×2"], "activations") == most_bytes(rows["ddp ×2"], "activations")


def test_accumulating_without_synchronization_keeps_whole_gradients(table):
    rows, _ = table
    whole = most_bytes(rows["ddp ×2"], "gradients")
    assert most_bytes(rows["fsdp ×2 · accumulate 4"], "unreduced") == whole
    assert most_bytes(
        rows["fsdp ×2 · accumulate 4 · sync every pass"], "unreduced"
    ) == pytest.approx(LARGEST, rel=0.1)
    assert most_bytes(rows["fsdp ×2"], "unreduced") == pytest.approx(LARGEST, rel=0.1)


def test_what_is_communicated_and_how_often(table):
    rows, _ = table
    whole = most_bytes(rows["ddp ×2"], "parameters")

    def communicated(name):
        row = rows[name]
        return row["all_gathers_per_step"], row["reduce_scatters_per_step"], row["bytes_per_step"]

    # Every accumulation step gathers every unit twice. Gradients are reduced once per step, or in
    # every accumulation step with --sync-every-pass.
    assert communicated("fsdp ×1") == (0, 0, 0)
    assert communicated("fsdp ×2") == (2 * UNITS, UNITS, 3 * whole)
    assert communicated("fsdp ×2 · accumulate 4") == (8 * UNITS, UNITS, 9 * whole)
    assert communicated("fsdp ×2 · accumulate 4 · sync every pass") == (
        8 * UNITS,
        4 * UNITS,
        12 * whole,
    )
    # Parameters are sent in bf16, gradients in fp32.
    assert communicated("fsdp ×2 · bf16") == (2 * UNITS, UNITS, 2 * whole)


def test_every_row_is_equal_and_losses_in_low_precision_are_close(table):
    rows, _ = table
    for name, row in rows.items():
        assert row["verify"]["equal"], name
        assert row["loss_difference"] <= (0.02 if "16" in name else 1e-5), name
        assert not row["skipped_steps"]


def test_collectives_do_not_count_as_compute(table):
    """gloo blocks the thread that computes: an all-gather inside a forward pass is exposed
    communication."""
    rows, folder = table
    run = folder / rows["fsdp ×2 · accumulate 4"]["runs"][0]
    events = [
        json.loads(line) for line in (run / "events" / "rank0.jsonl").read_text().splitlines()
    ]
    one = [event for event in events if event.get("step") == 2]
    forwards = [event for event in one if event["event"] == "forward"]
    gathers = [event for event in one if event["event"] == "all_gather"]
    inside = [
        g for g in gathers for f in forwards if f["start"] <= g["start"] and g["end"] <= f["end"]
    ]
    assert len(inside) == 4 * UNITS
    assert {gather["unit"] for gather in gathers} == {"0", "2", "4", "6", "8"}
    last = max(event["start"] for event in one if event["event"] == "backward")
    assert all(event["start"] >= last for event in one if event["event"] == "reduce_scatter"), (
        "reduced before the last accumulation step"
    )
    metrics = rows["fsdp ×2 · accumulate 4"]["metrics"]
    assert metrics["communication_seconds"] > 0
    assert metrics["overlap"] == pytest.approx(0, abs=0.01)


ODD = """
import torch
from torch import nn
F = nn.functional

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 16)
        self.twice = nn.Linear(16, 16)
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.borrowed = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.frozen(self.embedding(x))
        x = self.twice(torch.tanh(self.twice(x)))
        x, _ = self.recurrent(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.borrowed(x) + F.linear(x, self.borrowed.weight))

def odd():
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, (2, 256, 6), generator=chance)
    return {
        "model": Odd,
        "data": (tokens[0], tokens[1]),
        "loss": lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
        "batch_size": 13,
    }
"""


def test_frozen_unused_tied_and_borrowed_parameters(tmp_path: Path):
    (tmp_path / "odd.py").write_text(ODD)
    options = ["--workload", "odd.py:odd", "--replicas", "3", "--accumulate", "3", "--json"]
    found = run_paralab("verify", "fsdp", *options, cwd=tmp_path).json
    assert all(case["equal"] for case in found["configurations"])
    assert [case["options"]["partial_last_batch"] for case in found["configurations"]] == [
        False,
        True,
    ]
    plan = json.loads((tmp_path / found["run_folder"] / "manifest.json").read_text())[
        "configurations"
    ][0]["plan"]
    # Tied, used elsewhere, called twice, or unused: gathered with the whole model.
    assert plan["shard_units"] == ["frozen", "recurrent", "blocks.0", "blocks.1", "blocks.2"]


def test_saved_weights_are_those_of_ddp(tmp_path: Path):
    torch = pytest.importorskip("torch")
    options = [
        "--workload",
        "cnn:tiny",
        "--steps",
        "3",
        "--precision",
        "fp64",
        "--save-weights",
        "--json",
    ]
    saved = []
    for strategy in ("ddp", "fsdp"):
        folder = run_paralab("run", strategy, *options, cwd=tmp_path).json["run_folder"]
        saved.append(torch.load(tmp_path / folder / "weights.pt", weights_only=True))
    ours, theirs = saved
    assert list(ours) == list(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-10, atol=1e-10)
