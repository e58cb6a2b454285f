"""A trial with fake tensors counts the same bytes as a real rank does."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from paralab.plan.estimate import estimate, micro_batch_sizes
from paralab.plan.plan import Stage
from paralab.record.status_board import StatusBoard
from paralab.record.writer import EventWriter
from paralab.worker.inspection.memory_trial import EarlierTrials, _Trial, run_trial
from paralab.worker.loop import Extras, train
from paralab.worker.optimizer import make_optimizer
from paralab.workload.sequence_plan import SequencePlan, SplitBlock
from paralab.workload.tensor_group import TensorGroup, TensorPlan
from tests.worker.one_rank import make_plan, make_workload

KINDS = ("parameters", "gradients", "optimizer", "activations")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(3, 2)
        self.first.bias.requires_grad_(False)
        self.offset = torch.ones(3)  # neither a parameter nor a buffer

    def forward(self, x):
        return self.head(self.second(self.first(x + self.offset)).relu())


class Blocks(nn.Module):
    """The second block is larger than everything else that is saved."""

    def __init__(self):
        super().__init__()
        widths = (50, 90, 20)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(3, w), nn.GELU(), nn.Linear(w, 3), nn.Tanh()) for w in widths)
        )
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.blocks(x))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 50), nn.GELU(), nn.Linear(50, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def normalized():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def measure(folder, workload, plan):
    """Train as rank 0, and return the kinds in its last `memory` event."""
    writer = EventWriter(folder / "rank0.jsonl")
    StatusBoard.create(folder / "board", 1)
    board = StatusBoard(folder / "board", 1)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        assert train(workload, plan, 0, writer, 0.0, Extras(), board)
    finally:
        writer.close()
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
    events = map(json.loads, (folder / "rank0.jsonl").read_text().splitlines())
    memory = [event for event in events if event["event"] == "memory"][-1]
    return {kind: memory[kind] for kind in KINDS}


@pytest.mark.parametrize(
    ("model", "options", "fields"),
    [
        (lambda: nn.Linear(3, 2), {}, {}),
        (Tied, {}, {"optimizer": adam}),
        (Checkpointed, {}, {}),
        (normalized, {"precision": "fp64"}, {}),
        (Checkpointed, {"precision": "bf16"}, {}),
        (Blocks, {"recompute": "full"}, {}),
        (Blocks, {"recompute": "selective"}, {}),
    ],
    ids=["linear", "tied", "checkpointed", "fp64", "bf16", "full", "selective"],
)
def test_equal_to_a_real_rank(tmp_path, model, options, fields):
    workload = make_workload(model=model, **fields)
    recomputed = tuple(f"blocks.{number}" for number in range(3)) if "recompute" in options else ()
    plan = make_plan(workload, steps=2, **{**options, "recompute": None})
    plan = replace(plan, recompute=options.get("recompute"), recomputed=recomputed)
    [found] = estimate(plan, run_trial(plan, workload, micro_batch_sizes(plan)))
    assert {kind: getattr(found, kind) for kind in KINDS} == measure(tmp_path, workload, plan)


def test_the_peak_of_a_layer():
    """y = W x with 4 samples. On top of W (6 numbers) and b (2), forward and backward need at most
    y (8), the loss, and the gradients of y, W, and b; a gradient that exists is added to, so both
    the old and the new one exist for a moment."""
    workload = make_workload()
    trial = run_trial(make_plan(workload), workload, [4, 8])
    four, eight = trial.passes
    assert four.batch_bytes == 4 * 4 * (3 + 2)
    assert 4 * (8 + 8) <= four.first <= 4 * (8 + 8 + 6 + 2 + 8)
    assert eight.first - four.first == pytest.approx(4 * (8 + 8), abs=40)
    assert trial.step_bytes == 0  # momentum is updated in place
    assert trial.built is None


@pytest.fixture
def fake_ranks():
    """Simulate 4 ranks without processes. Their collectives return at once."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_the_peak_of_fsdp(fake_ranks):
    """torch's own tracker watches the real FSDP2 with fake tensors. It knows when each unit's
    tensors exist; the estimate adds up their largest sizes."""

    def model():
        wide = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))
        return nn.Sequential(nn.Linear(3, 64), *wide, nn.Linear(64, 2))

    workload = make_workload(model=model)
    plan = make_plan(workload, "fsdp", replicas=4, batch_size=256, samples=1000)
    plan = replace(plan, shard_units=tuple(str(number) for number in range(1, 7)))
    found = estimate(plan, run_trial(plan, workload, [64]))[0]

    with FakeTensorMode():
        sharded = model()
        for unit in (*plan.shard_units, ""):
            fully_shard(sharded.get_submodule(unit), mesh=fake_ranks)
        optimizer = make_optimizer(workload, sharded)
        inputs, targets = torch.empty(64, 3), torch.empty(64, 2)
        for _ in range(2):  # the optimizer's state exists from the second step on
            optimizer.zero_grad()
            tracker = FSDPMemTracker(sharded, optimizer)
            tracker.track_inputs((inputs, targets))
            with tracker:
                workload.loss(sharded(inputs), targets).backward()
                optimizer.step()
    [snapshot] = tracker.get_tracker_snapshot("peak").values()
    assert found.peak == pytest.approx(snapshot["Total"], rel=0.1)


def test_the_first_of_two_shards():
    """x (3) -> 8 columns -> tanh -> 8 rows -> 2. A shard has 4 of the 8, and the whole last bias. It
    saves x, tanh(h), and its own part of everything between."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    workload = make_workload(model=lambda: model)
    group = TensorGroup("", ("0",), "2", 8 * (3 + 1 + 2), kept=True)
    plan = replace(make_plan(workload), strategy="tp", tensor_plan=TensorPlan(2, (group,)))
    whole = run_trial(make_plan(workload), workload, [4])
    shard = run_trial(plan, workload, [4])
    sizes = [(each.elements, each.gradient_bytes, each.state_bytes) for each in shard.weights]
    assert sizes == [(n, 4 * n, 4 * n) for n in (4 * 3, 4, 2 * 4, 2)]
    assert shard.passes[0].saved == (4 * 4 * (3 + 4),)
    assert whole.passes[0].saved == (4 * 4 * (3 + 8),)
    assert shard.passes[0].again < whole.passes[0].again


@pytest.mark.parametrize("recompute", [None, "full"])
def test_the_first_part_of_a_sequence(recompute):
    """Rank 0 has 5 of 9 tokens. In attention, it has one of two heads for all tokens. Outside the
    block, it computes everything."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Sequential(nn.Linear(8, 24), nn.Identity())

        def forward(self, x):
            heads = (
                each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.mix(x).chunk(3, -1)
            )
            attended = nn.functional.scaled_dot_product_attention(*heads)
            return x + attended.transpose(1, 2).flatten(2)

    workload = make_workload(
        model=lambda: nn.Sequential(Attention(), nn.Flatten(), nn.Linear(72, 2)),
        data=(torch.randn(8, 9, 8), torch.randn(8, 2)),
    )
    block = SplitBlock("0", (1,), 1, 216, cut=((0, 1),), gathered=((0, 1),), kept=True)
    plan = make_plan(workload)
    if recompute:
        plan = replace(plan, recompute=recompute, recomputed=("0",))
    split = replace(plan, shards=2, sequence_plan=SequencePlan(2, (block,), 9))
    whole, part = (run_trial(each, workload, [4]) for each in (plan, split))
    assert part.weights == whole.weights
    size = 4 * 9 * 8 * 4  # bytes of 4 samples
    if recompute:  # of the block, only x is saved
        saved = [size + size, size + size * 5 // 9]
    else:  # x; queries, keys, values, output, and one sum per head and token
        attention = 4 * size + 4 * 2 * 9 * 4
        saved = [size + size + attention, size + size * 5 // 9 + attention // 2]
    assert [each.passes[0].saved for each in (whole, part)] == [(each,) for each in saved]
    assert (part.passes[0].recomputed < whole.passes[0].recomputed) == bool(recompute)


def test_activations_of_each_part():
    """The cut is before the second layer, which saves what the first one sends."""
    workload = make_workload(
        model=lambda: nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
    )
    plan = make_plan(workload)
    parts = (Stage("", ("0",), 1, 1.0, 0), Stage("2", ("2",), 1, 1.0, 0))
    [found] = run_trial(replace(plan, stage_parts=parts), workload, [4]).passes
    assert found.saved == (4 * 4 * 3 + 4 * 4 * 7, 4 * 4 * 7)  # x and tanh(x); tanh(x)
    [whole] = run_trial(plan, workload, [4]).passes
    assert whole.saved == (4 * 4 * 3 + 4 * 4 * 7,)


def test_trials_with_other_cuts_reuse_peaks(monkeypatch):
    workload = make_workload(
        model=lambda: nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
    )
    whole = make_plan(workload)
    parts = (Stage("", ("0",), 1, 1.0, 0), Stage("2", ("2",), 1, 1.0, 0))
    cut = replace(whole, stage_parts=parts)
    alone, known = run_trial(cut, workload, [4, 6]), EarlierTrials({}, {})
    run_trial(whole, workload, [4], known)
    peaks = []
    monkeypatch.setattr(_Trial, "_peak_of", lambda *_: peaks.append(7) or 7)
    again = run_trial(cut, workload, [4, 6], known)
    assert again.passes[0] == alone.passes[0]  # measured with the first trial, except `saved`
    assert (again.passes[1].first, again.passes[1].again, len(peaks)) == (7, 7, 2)
    assert (again.weights, again.step_bytes) == (alone.weights, alone.step_bytes)


def test_a_stage_that_is_called_twice_has_no_estimate():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + super().forward(x)

    workload = make_workload(model=lambda: Twice(nn.Linear(3, 2), nn.Linear(2, 2)))
    parts = (Stage("", ("0",), 1, 1.0, 0), Stage("1", ("1",), 1, 1.0, 0))
    with pytest.raises(ValueError, match="start of each stage"):
        run_trial(replace(make_plan(workload), stage_parts=parts), workload, [4])


def test_a_recurrent_layer_has_no_estimate():
    """The estimate for an LSTM was 76% too small, and said nothing: oneDNN saves a workspace that
    is four times as large as everything else, and which is empty with fake tensors. oneDNN runs no
    GRU, so that has an estimate on the CPU."""

    class Last(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.head = layer, nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.layer(x[:, None])[0][:, -1])

    recurrent = make_workload(model=lambda: Last(nn.LSTM(3, 5, batch_first=True)))
    with pytest.raises(ValueError, match="mkldnn_rnn_layer"):
        run_trial(make_plan(recurrent), recurrent, [4])
    gated = make_workload(model=lambda: Last(nn.GRU(3, 5, batch_first=True)))
    assert sum(run_trial(make_plan(gated), gated, [4]).passes[0].saved) > 0


def test_fsdp_in_bf16_has_an_estimate_for_convolutions():
    """The optimizer's trial ran fp32 modules on bf16 samples, which a convolution rejects."""

    def model():
        return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 3), nn.Flatten())

    workload = make_workload(model=model)
    plan = replace(make_plan(workload), strategy="fsdp", precision="bf16", zero=3)
    assert plan.shards_parameters
    assert [each.bytes for each in run_trial(plan, workload, [4]).weights] == [24, 8]


def test_a_model_that_needs_values_while_it_is_built():
    """The model reads its initial values, which fake tensors do not have. So it is built with
    real tensors."""

    def model():
        layer = nn.Linear(3, 2)
        assert float(layer.weight.detach().abs().max()) > 0
        return layer

    workload = make_workload(model=model)
    trial = run_trial(make_plan(workload), workload, [4])
    assert trial.built is not None
    assert [each.bytes for each in trial.weights] == [24, 8]


def test_a_huge_model_needs_no_memory():
    """A trillion parameters."""
    workload = make_workload(
        model=lambda: nn.Sequential(
            nn.Linear(3, 2**20), nn.Linear(2**20, 2**20), nn.Linear(2**20, 2)
        )
    )
    trial = run_trial(make_plan(workload), workload, [4])
    assert sum(each.bytes for each in trial.weights) > 4 * 2**40
