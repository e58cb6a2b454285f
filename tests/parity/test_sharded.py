"""FSDP: memory per rank, what it communicates and when, and models that are hard to shard."""

import json
from pathlib import Path

import pytest

from tests.conftest import run_paralab
from tests.parity.proofs import verify

pytestmark = pytest.mark.processes

KINDS = ("parameters", "gradients", "optimizer")
UNITS = 5  # layers of mlp:tiny: four of one width, and the classifier
LARGEST = 16 * (16 + 1) * 4  # bytes of one of these four


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Run one comparison: ddp, and fsdp on 1, 2, and 4 ranks, with and without accumulation, with
    other ZeRO stages, and with shard groups. Return its rows by name, and its folder."""
    folder = tmp_path_factory.mktemp("sharded")
    fsdp = [f"fsdp --replicas {ranks}" for ranks in (1, 2, 4)]
    passes = [
        "fsdp --accumulate 4",
        "fsdp --accumulate 4 --sync-every-pass",
        "fsdp --precision bf16",
        "fsdp --precision fp16",
    ]
    ways = ["fsdp --zero 1", "fsdp --zero 2", "fsdp --replicas 4 --shard-groups 2"]
    common = ["--workload", "mlp:tiny", "--steps", "2", "--rounds", "1", "--json"]
    found = run_paralab(
        "compare", "ddp --replicas 2", *fsdp, *passes, *ways, *common, cwd=folder
    ).json
    return {row["name"]: row for row in found["rows"]}, folder / found["run_folder"]


def most_bytes(row, *kinds):
    """Return the largest number of bytes of these kinds on any rank."""
    return max(sum(memory[kind] for kind in kinds) for memory in row["peak_bytes"])


def test_memory_per_rank_falls_with_the_ranks(table):
    rows, _ = table
    whole = most_bytes(rows["ddp ×2"], *KINDS)
    assert most_bytes(rows["fsdp ×1"], *KINDS) == whole
    assert most_bytes(rows["fsdp ×2"], *KINDS) == pytest.approx(whole / 2, rel=0.05)
    assert most_bytes(rows["fsdp ×4"], *KINDS) == pytest.approx(whole / 4, rel=0.05)
    # Autograd saves the same, because gathered parameters do not count as activations.
    assert most_bytes(rows["fsdp ×2"], "activations") == most_bytes(rows["ddp ×2"], "activations")


def test_each_zero_stage_shards_more(table):
    rows, _ = table
    whole = {kind: most_bytes(rows["ddp ×2"], kind) for kind in KINDS}
    shares = {
        name: [round(most_bytes(rows[name], kind) / whole[kind], 1) for kind in KINDS]
        for name in ("fsdp ×2 · ZeRO-1", "fsdp ×2 · ZeRO-2", "fsdp ×2", "fsdp ×4 · 2 shard groups")
    }
    assert shares == {  # parameters, gradients, optimizer state
        "fsdp ×2 · ZeRO-1": [1.0, 1.0, 0.5],
        "fsdp ×2 · ZeRO-2": [0.5, 0.5, 0.5],
        "fsdp ×2": [0.5, 0.5, 0.5],
        "fsdp ×4 · 2 shard groups": [0.5, 0.5, 0.5],
    }
    # Full parameters stay gathered until the backward pass, so all units are gathered at once.
    assert most_bytes(rows["fsdp ×2 · ZeRO-2"], "gathered") == whole["parameters"]
    assert most_bytes(rows["fsdp ×2"], "gathered") < whole["parameters"]
    # Autograd saves the same.
    activations = {most_bytes(rows[name], "activations") for name in ("ddp ×2", *list(shares)[:3])}
    assert len(activations) == 1


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
    assert communicated("fsdp ×2 · ZeRO-2") == (UNITS, UNITS, 2 * whole)
    assert communicated("fsdp ×2 · ZeRO-1") == (0, 0, 2 * whole)
    zero = rows["fsdp ×2 · ZeRO-1"]
    assert (zero["all_reduces_per_step"], zero["broadcasts_per_step"]) == (1, 2)
    # An all-reduce between the groups sums each shard, which is half as large as the unit.
    groups = "fsdp ×4 · 2 shard groups"
    assert communicated(groups) == (2 * UNITS, UNITS, 3.5 * whole)
    assert rows[groups]["all_reduces_per_step"] == UNITS
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
    one = [event for event in events if event.get("step") == 1]
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
    # Parameters that are tied, used elsewhere, called twice, or unused are gathered with the whole
    # model.
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
    for strategy in ("ddp", "fsdp", "fsdp --zero 1"):
        words = ["run", *strategy.split(), *options]
        folder = run_paralab(*words, cwd=tmp_path).json["run_folder"]
        saved.append(torch.load(tmp_path / folder / "weights.pt", weights_only=True))
    theirs, *ours = saved
    for weights in ours:
        assert list(weights) == list(theirs)
        for name in weights:
            torch.testing.assert_close(weights[name], theirs[name], rtol=1e-10, atol=1e-10)


OPTIMIZERS = """
import torch
from torch import nn
F = nn.functional

def of(optimizer, **fields):
    chance = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 3, 6, 6, generator=chance), torch.randint(3, (48,), generator=chance)
    def model():
        conv = nn.Conv2d(3, 4, 3)
        net = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        return net.to(memory_format=torch.channels_last)
    common = {"model": model, "data": (x, y), "loss": F.cross_entropy, "batch_size": 8}
    return common | {"optimizer": optimizer} | fields

def state_in_advance():  # its constructor creates state for all parameters
    return of(lambda parameters: torch.optim.Adagrad(parameters, 0.05))

def groups_and_scheduler():
    def optimizer(parameters):
        large = [p for p in parameters if p.ndim > 1]
        small = [p for p in parameters if p.ndim == 1]
        return torch.optim.AdamW([{"params": large, "weight_decay": 0.1}, {"params": small}], 0.01)
    # It reads the optimizer's defaults.
    cycle = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    return of(optimizer, scheduler=cycle)

def whole_parameters():
    return of(lambda parameters: torch.optim.Adafactor(parameters, 0.01))

class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step()

def clipped():
    return of(lambda parameters: Clipped(parameters, 0.1))
"""


def test_zero_1_with_unusual_optimizers(tmp_path: Path):
    """A bucket view changes the strides of a channels_last parameter. DDP then mixed up the
    gradient's elements."""
    (tmp_path / "optimizers.py").write_text(OPTIMIZERS)
    names = ("state_in_advance", "groups_and_scheduler", "whole_parameters", "clipped")
    options = {"zero": 1, "replicas": 2, "accumulate": 1, "samples": 30}
    proof = verify(tmp_path, [f"optimizers.py:{name}" for name in names], "fsdp", **options)
    assert [case["equal"] for case in proof["configurations"]] == [True, True, True]
    [refused] = proof["skipped"]
    assert "Clipped" in refused["reason"]


@pytest.mark.parametrize("way", ["--zero 1", "--replicas 4 --shard-groups 2"])
def test_a_run_resumes_from_sharded_optimizer_state(tmp_path: Path, way: str):
    torch = pytest.importorskip("torch")
    fixed = ["--workload", "mlp:tiny", "--precision", "fp64", "--save-weights", "--json"]
    kept = ["--checkpoint", "kept"]

    def weights(*words):
        folder = run_paralab("run", *words, *fixed, cwd=tmp_path).json["run_folder"]
        return torch.load(tmp_path / folder / "weights.pt", weights_only=True)

    whole = weights("ddp", "--steps", "4")
    weights("fsdp", *way.split(), "--steps", "2", *kept)
    same = weights("fsdp", *way.split(), "--steps", "3", *kept, "--resume")
    other = weights("ddp", "--steps", "4", *kept, "--resume")
    for name in whole:
        torch.testing.assert_close(other[name], whole[name], rtol=1e-10, atol=1e-10)
    assert any(not torch.equal(same[name], other[name]) for name in same)
