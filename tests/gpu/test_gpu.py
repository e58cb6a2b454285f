"""What only a GPU can test: the real nn.DataParallel, CUDA event timing, steps that GradScaler
skips, and two kinds of devices."""

import copy
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from paralab.analyse.recording import Recording
from paralab.analyse.time_intervals import length
from paralab.worker.measure.profile import FIRST, STEPS
from tests.conftest import run_paralab

pytestmark = [pytest.mark.gpu, pytest.mark.processes]


def test_real_dataparallel_splits_inside_the_model(tmp_path):
    result = run_paralab(
        "run", "dp", "--replicas", "3", "--steps", "3", "--device", "cuda", "--json", cwd=tmp_path
    ).json
    if torch.cuda.device_count() < 3:
        assert any("does the work of multiple devices" in warning for warning in result["warnings"])
    assert sorted(split["shape"] for split in result["splits"]) == [
        [20, 1024],
        [22, 1024],
        [22, 1024],
    ]
    assert all(split["physical"].startswith("cuda:") for split in result["splits"])


def test_events_are_timed_on_the_device(tmp_path):
    result = run_paralab(
        "run",
        "single",
        "--workload",
        "mlp:large",
        "--steps",
        "12",
        "--device",
        "cuda",
        "--json",
        cwd=tmp_path,
    ).json
    lines = (tmp_path / result["run_folder"] / "events" / "rank0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["event"] == "step"]
    for step in steps:
        inside = [
            e
            for e in events
            if e.get("step") == step["step"] and e["event"] in ("forward", "backward", "optimizer")
        ]
        assert len(inside) == 3
        spent = sum(e["end"] - e["start"] for e in inside)
        assert 0.5 < spent / (step["end"] - step["start"]) < 1.05
    assert all(later["start"] >= earlier["start"] for earlier, later in itertools.pairwise(steps))
    assert result["peak_bytes"][0]["how"] == "allocator"


NO_WAITING = """
import os, torch
from torch import nn

calls = 0

def loss(output, target):
    global calls
    calls += 1
    if calls == 12 and "RANK" in os.environ:  # in training, after the first step, whose gradients are looked at
        # From here on every operation that makes the host wait for the device is an error.
        torch.cuda.set_sync_debug_mode("error")
    return nn.functional.mse_loss(output, target)

def workload():
    return {"model": lambda: nn.Linear(64, 64), "data": (torch.randn(256, 64), torch.randn(256, 64)), "loss": loss}
"""


@pytest.mark.parametrize("strategy", ["single", "dp", "mp", "pipeline"])
def test_measuring_does_not_make_the_host_wait(tmp_path, strategy):
    """Reading a past step's loss with item() once waited for the next step, which cost 2% for
    gpt:124m on an H200."""
    (tmp_path / "waiting.py").write_text(
        NO_WAITING.replace(
            "nn.Linear(64, 64)", "nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))"
        )
    )
    done = run_paralab(
        "run",
        strategy,
        "--workload",
        "waiting.py:workload",
        "--steps",
        "30",
        "--device",
        "cuda",
        "--json",
        cwd=tmp_path,
    )
    assert done.code == 0, done.err


def test_a_scale_that_overflows_skips_steps_and_recovers(tmp_path):
    options = [
        "--workload",
        "gpt:tiny",
        "--precision",
        "fp16",
        "--loss-scale",
        "1e9",
        "--steps",
        "40",
        "--device",
        "cuda",
    ]
    result = run_paralab("run", "ddp", "--replicas", "2", *options, "--json", cwd=tmp_path).json
    assert 0 < result["skipped_steps"] < 40
    assert result["losses"][-1] < result["losses"][0]
    lines = (tmp_path / result["run_folder"] / "events" / "rank0.jsonl").read_text().splitlines()
    scales = [event["scale"] for event in map(json.loads, lines) if event["event"] == "optimizer"]
    assert scales[0] == pytest.approx(1e9)
    assert scales[-1] == pytest.approx(1e9 / 2 ** result["skipped_steps"])


def test_stages_on_two_kinds_of_device_train_like_one(tmp_path):
    """One GPU and the CPU are two real devices. Tensors must move between them in forward and
    backward, even outside the main path."""
    from paralab.plan.grid import Device
    from paralab.plan.plan import Plan, RankPlan, Stage
    from paralab.record.writer import EventWriter
    from paralab.worker.measure.clock import Clock
    from paralab.worker.measure.memory import ActivationMeter
    from paralab.worker.measure.probes import Probe
    from paralab.worker.precision import Precision
    from paralab.worker.rank_context import MicroBatch, RankContext
    from paralab.worker.strategies.pipeline_threads import PipelineThreads
    from paralab.workload.workload import Workload

    class Masked(nn.Module):
        """The second layer takes a mask that was created on the first device."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, mask):
            return self.linear(x * mask)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), Masked()

        def forward(self, x):
            mask = (x > 0).float()
            return self.second(self.norm(self.first(x)), mask)

    torch.manual_seed(0)
    alone = Net().double()
    spread = copy.deepcopy(alone)
    x, y = torch.randn(12, 8, dtype=torch.float64), torch.randn(12, 8, dtype=torch.float64)
    devices = tuple(
        Device(name, name, f"stage {n}", False, False) for n, name in enumerate(("cuda:0", "cpu"))
    )
    rank = RankPlan(0, 0, devices, 12, (12, 12))
    parts = (
        Stage("", ("first", "norm"), 2, 1.0, 0),
        Stage("second", ("second.linear",), 1, 1.0, 0),
    )
    numbers = dict(
        batch_size=12,
        accumulate=1,
        micro_batches=3,
        steps=1,
        epochs=None,
        samples=12,
        num_steps=1,
        seed=0,
    )
    settings = dict(
        precision="fp64",
        loss_scale=None,
        bucket_mb=None,
        find_unused=False,
        device="cuda",
        placement="spread",
        threads_per_device=1,
    )
    texts = dict(
        backend=None, arithmetic="", environment={}, reasons=(), remarks=(), differences=()
    )
    plan = Plan(
        "pipeline", "", 1, 2, **numbers, **settings, ranks=(rank,), stage_parts=parts, **texts
    )
    workload = Workload(Net, (x, y), nn.functional.mse_loss, name="net")
    probe = Probe(Clock(0.0), EventWriter(tmp_path / "rank0.jsonl"))
    job = RankContext(
        plan, rank, workload, Precision(plan), probe, ActivationMeter((), False), lambda *_: None
    )
    micros = [
        MicroBatch(x[rows], y[rows], 1 / 3) for rows in (slice(0, 4), slice(4, 8), slice(8, 12))
    ]
    loss = PipelineThreads(job, spread).forward_backward([micros])
    expected = nn.functional.mse_loss(alone(x), y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert {str(p.device) for p in spread.parameters()} == {"cuda:0", "cpu"}
    for mine, theirs in zip(spread.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=0, atol=1e-12)


def profiled(folder):
    """Return the recording, the profiler's spans on rank 0 in seconds, and the profiled steps."""
    trace = json.loads((folder / "profile" / "rank0.json").read_text())["traceEvents"]
    spans = [
        (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["cat"], e["name"])
        for e in trace
        if e.get("ph") == "X"
    ]
    return Recording.read(folder), spans, range(FIRST, FIRST + STEPS)


def test_computing_agrees_with_the_profiler(tmp_path):
    """This model's kernels keep the GPU busy. If the host could not keep up, a span would have
    gaps without a kernel."""
    options = ["--workload", "gpt:124m", "--steps", "9", "--profile"]
    result = run_paralab("run", "single", *options, "--device", "cuda", "--json", cwd=tmp_path).json
    recording, _, steps = profiled(tmp_path / result["run_folder"])
    trace = json.loads((tmp_path / result["run_folder"] / "profile" / "rank0.json").read_text())[
        "traceEvents"
    ]
    # The device is behind the host. Count only the kernels that these steps launched, not all in
    # the profiler's window.
    window = [
        e
        for e in trace
        if e.get("ph") == "X"
        and e["name"].startswith("ProfilerStep#")
        and e["cat"] == "user_annotation"
    ]
    begin, end = min(e["ts"] for e in window), max(e["ts"] + e["dur"] for e in window)
    launched = {
        e["args"]["correlation"]
        for e in trace
        if e.get("cat") == "cuda_runtime" and begin <= e["ts"] <= end
    }
    launched |= {
        e["args"]["correlation"]
        for e in trace
        if e.get("cat") == "cuda_driver" and begin <= e["ts"] <= end
    }
    kernels = [
        e for e in trace if e.get("cat") == "kernel" and e["args"]["correlation"] in launched
    ]
    theirs = length((e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in kernels)
    names = ("forward", "backward", "optimizer")
    mine = sum(
        s["end"] - s["start"]
        for step in steps
        for s in recording.spans(0, step)
        if s["event"] in names
    )
    assert mine == pytest.approx(theirs, rel=0.05)


def test_communication_agrees_with_the_profiler(tmp_path):
    """Two ranks share a GPU over gloo, whose collectives torch's profiler records."""
    options = ["--workload", "mlp:large", "--steps", "12", "--profile", "--backend", "gloo"]
    result = run_paralab("run", "ddp", *options, "--device", "cuda", "--json", cwd=tmp_path).json
    recording, spans, steps = profiled(tmp_path / result["run_folder"])
    theirs = length(
        (start, end)
        for start, end, kind, name in spans
        if name == "gloo:all_reduce" and kind == "user_annotation"
    )
    mine = sum(
        length(
            (s["start"], s["end"]) for s in recording.spans(0, step) if s["event"] == "all_reduce"
        )
        for step in steps
    )
    assert mine == pytest.approx(theirs, rel=0.05)


def test_load_comes_from_nvml(tmp_path):
    result = run_paralab(
        "run",
        "single",
        "--workload",
        "mlp:large",
        "--steps",
        "300",
        "--device",
        "cuda",
        "--json",
        cwd=tmp_path,
    ).json
    load = result["metrics"]["load"]
    assert load["not_measured"] is None
    assert 0 < load["gpu"][0]["utilization"] <= 1
    assert load["gpu"][0]["used_bytes"] > result["peak_bytes"][0]["bytes"] * 0.5
    assert result["metrics"]["flops"]["per_second"] > 0


@pytest.mark.parametrize(
    "strategy",
    [
        ["pipeline", "--schedule", "1f1b"],
        ["hybrid", "--schedule", "zero-bubble"],
        ["hybrid", "--shards", "2"],
        ["hybrid", "--shards", "2", "--stages", "1", "--zero", "3"],
    ],
    ids=" ".join,
)
def test_strategies_over_processes_share_a_gpu(tmp_path, strategy):
    """Ranks on one GPU use gloo, which copies through the host. Training still equals that of one
    device."""
    proof = run_paralab(
        "verify", *strategy, "--workload", "gpt:tiny", "--device", "cuda", "--json", cwd=tmp_path
    ).json
    assert proof["passed"]
    assert any(case["equal"] for case in proof["configurations"])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_training_on_a_gpu_is_saved_and_goes_on(tmp_path, precision):
    run = [
        "run",
        "ddp",
        "--replicas",
        "2",
        "--workload",
        "gpt:tiny",
        "--precision",
        precision,
        "--device",
        "cuda",
        "--json",
    ]
    whole = run_paralab(*run, "--steps", "12", cwd=tmp_path).json
    half = run_paralab(
        *run, "--steps", "6", "--checkpoint", "ckpt", "--checkpoint-every", "3", cwd=tmp_path
    ).json
    rest = run_paralab(*run, "--steps", "12", "--checkpoint", "ckpt", "--resume", cwd=tmp_path).json
    assert rest["begun_at_step"] == 6
    assert half["losses"] + rest["losses"] == pytest.approx(whole["losses"], rel=1e-3)


def test_fsdp_does_not_share_a_gpu_over_gloo(tmp_path):
    """gloo's reduce-scatter of CUDA tensors crashed ranks with SIGSEGV (torch 2.11)."""
    refused = run_paralab(
        *"run fsdp --replicas 9 --workload mlp:tiny --device cuda --backend gloo".split(),
        cwd=tmp_path,
    )
    assert (refused.code, "--backend local" in refused.err) == (2, True)
    assert (
        run_paralab(
            "run",
            "fsdp",
            "--replicas",
            "1",
            "--workload",
            "mlp:tiny",
            "--device",
            "cuda",
            cwd=tmp_path,
        ).code
        == 0
    )


def hunters(folder):
    shutil.copy(Path(__file__).parent.parent / "parity" / "hunters.py", folder)


@pytest.mark.parametrize("strategy", ["dp", "pipeline"])
def test_the_same_command_trains_the_same_model(tmp_path, strategy):
    """Replicas that share a GPU are threads, and once drew dropout masks in random order."""
    hunters(tmp_path)
    options = [
        "--workload",
        "hunters.py:dropping",
        "--steps",
        "8",
        "--device",
        "cuda",
        "--save-weights",
    ]
    options += ["--replicas", "3"] if strategy == "dp" else []
    for name in ("one", "two"):
        assert run_paralab("run", strategy, *options, "--out", name, cwd=tmp_path).code == 0
    one, two = (
        torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("one", "two")
    )
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("workload", ["noisy", "statistics_used", "stateful", "padded"])
def test_a_forward_is_held_fixed_on_a_gpu(tmp_path, workload):
    hunters(tmp_path)
    options = [
        "--accumulate",
        "2",
        "--replicas",
        "2",
        "--micro-batches",
        "2",
        "--steps",
        "3",
        "--device",
        "cuda",
        "--json",
    ]
    proof = run_paralab(
        "verify", "all", "--workload", f"hunters.py:{workload}", *options, cwd=tmp_path
    ).json
    assert {case["strategy"] for case in proof["configurations"]} >= {
        "single",
        "dp",
        "ddp",
        "mp",
        "pipeline",
        "hybrid",
    }
    if workload in ("noisy", "statistics_used", "stateful"):
        assert any(
            case["excused"] and case["excused"]["max_difference"] > 1e-8
            for case in proof["configurations"]
        )
