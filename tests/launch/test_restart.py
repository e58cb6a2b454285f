"""Interrupted equals uninterrupted: inject faults into real runs and compare the final weights bit
for bit."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from bench.faults.inside import plant
from tests.conftest import DEADLINE_SECONDS, ROOT, run_paralab, wait_until

pytestmark = pytest.mark.processes

# Everything that a checkpoint must restore: dropout's random stream, Adam's two moments and
# step, a learning rate that changes, a BatchNorm's buffers, a Dataset that draws random numbers, an
# epoch that ends with a smaller batch.
WORKLOAD = """
import os, random, time, torch
from torch import nn
from torch.utils.data import Dataset

class Noisy(Dataset):
    def __len__(self):
        return 90
    def __getitem__(self, i):
        return torch.full((16,), i / 90) + torch.randn(16) * 0.1 + random.random(), torch.tensor([i / 90])

def loss(output, target):
    time.sleep(float(os.environ.get("SLOW", "0")))
    while os.path.exists("held"):
        time.sleep(0.05)
    return nn.functional.mse_loss(output, target)

def workload():
    return {
        "model": lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)),
        "data": Noisy(), "loss": loss, "batch_size": 24,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    }
"""
STEPS = 14
RUN = [
    "run",
    "ddp",
    "--replicas",
    "2",
    "--workload",
    "w.py:workload",
    "--steps",
    str(STEPS),
    "--save-weights",
]


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Return a folder with the workload and the uninterrupted run's weights."""
    folder = tmp_path_factory.mktemp("recovery")
    (folder / "w.py").write_text(WORKLOAD)
    done = run_paralab(*RUN, "--out", "whole", "--json", cwd=folder)
    assert done.code == 0, done.err
    return folder


def weights(folder):
    return torch.load(folder / "weights.pt")


def same(room, run):
    whole, other = weights(room / "whole"), weights(room / run)
    return all(torch.equal(whole[name], other[name]) for name in whole)


def survive(room, name, *options, **fault):
    """Run with an injected fault and a restart."""
    checkpoint = [
        "--checkpoint",
        f"{name}.ckpt",
        "--checkpoint-every",
        "3",
        "--max-restarts",
        "1",
        "--step-deadline",
        "3",
    ]
    return run_paralab(
        *RUN,
        *checkpoint,
        *options,
        "--out",
        name,
        "--json",
        cwd=room,
        environment=plant(room / f"{name}.mark", **fault),
    )


FAULTS = [
    ("kill", 1, "step", 8, ("Rank 1 ", "step 8", "SIGKILL")),
    ("gil", 1, "step", 8, ("Rank 1 ", "step 8", "GIL")),
]


@pytest.mark.parametrize(("kind", "rank", "phase", "step", "words"), FAULTS)
def test_a_fault_is_named_and_survived_bit_for_bit(room, kind, rank, phase, step, words):
    name = f"{kind}-{rank}-{phase}"
    done = survive(room, name, kind=kind, rank=rank, phase=phase, step=step)
    assert done.code == 0, done.err
    assert all(word in done.err for word in words)
    result = json.loads(done.out)
    assert (result["restarts"], result["reached_step"], result["steps"]) == (1, STEPS, STEPS)
    assert all(word in " ".join(result["warnings"]) for word in words)
    assert result["losses"] == json.loads((room / "whole" / "result.json").read_text())["losses"]
    assert same(room, name)


def test_a_hang_names_the_rank_its_line_and_who_waits(room):
    done = survive(room, "stop", "--max-restarts", "0", kind="stop", rank=1, phase="step", step=8)
    assert done.code == 1
    assert "Rank 1 is stopped (SIGSTOP" in done.err
    assert "step 8 took" in done.err
    assert "rank 0 waits in" in done.err
    assert json.loads((room / "stop" / "stacks" / "0" / "rank1.state").read_text())["state"] == "T"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("exit0", ("Rank 0 failed", "step 2", "code 0")),
        ("nan", ("nan", "step 2")),
    ],
)
def test_a_silent_exit_is_a_failure(tmp_path, kind, words):
    run = ["run", "single", "--workload", "mlp:tiny", "--steps", "4", "--checkpoint", "ckpt"]
    done = run_paralab(
        *run,
        cwd=tmp_path,
        environment=plant(tmp_path / "mark", kind=kind, rank=0, phase="step", step=2),
    )
    assert (done.code, all(word in done.err for word in words)) == (1, True), done.err
    assert not list((tmp_path / "ckpt").glob("step-*"))


def test_a_repeated_failure_stops_the_restarts(room):
    broken = WORKLOAD.replace(
        "    time.sleep", "    assert output.shape[0] != 18, 'a short batch'\n    time.sleep"
    )
    (room / "always.py").write_text(broken)
    run = [
        "run",
        "single",
        "--workload",
        "always.py:workload",
        "--steps",
        "8",
        "--checkpoint",
        "always.ckpt",
        "--max-restarts",
        "5",
    ]
    done = run_paralab(*run, "--out", "always", cwd=room)
    assert done.code == 1
    assert "a short batch" in done.err
    assert "twice" in done.err
    assert (done.err.count("restart 1 of 5"), done.err.count("restart 2 of 5")) == (1, 0)


def begin(room, name, *options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLOW": "0.4"}
    command = [sys.executable, "-m", "paralab", *RUN, "--out", name, *options]
    process = subprocess.Popen(
        command,
        cwd=room,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    path = room / name / "events" / "rank0.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count('"event":"step"') >= 3)
    return process


def test_a_signal_saves_and_another_topology_resumes(room):
    """SIGTERM gives exit code 75. Continuing on two ranks is identical bit for bit; then continue on
    three ranks and on one."""
    process = begin(room, "term", "--checkpoint", "term.ckpt")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75, err
    assert "saved" in err
    reached = json.loads((room / "term" / "result.json").read_text())["reached_step"]
    assert 3 <= reached < STEPS
    listed = run_paralab("checkpoint", "verify", "term.ckpt", "--json", cwd=room).json
    assert [checkpoint["step"] for checkpoint in listed["checkpoints"]] == [reached]
    again = run_paralab(
        *RUN, "--checkpoint", "term.ckpt", "--resume", "--out", "term2", "--json", cwd=room
    ).json
    assert (again["begun_at_step"], again["reached_step"]) == (reached, STEPS)
    assert same(room, "term2")
    over = run_paralab(*RUN, "--checkpoint", "term.ckpt", "--resume", "--out", "term3", cwd=room)
    assert (over.code, f"{STEPS} steps" in over.err) == (0, True)


def test_a_folder_in_use_is_refused_and_ctrl_c_twice_stops_at_once(room):
    process = begin(room, "twice", "--checkpoint", "twice.ckpt", "--steps", "10000")
    other = run_paralab(*RUN, "--checkpoint", "twice.ckpt", "--resume", "--out", "other", cwd=room)
    assert (other.code, f"process {process.pid} on" in other.err) == (2, True)
    (room / "held").touch()  # no step can finish
    try:
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("Ctrl-C:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        (room / "held").unlink()
    assert process.returncode == 130, err


def test_a_run_resumes_with_another_topology(tmp_path):
    """ddp 2 -> ddp 3 -> single in fp64 equals a single device from beginning to end."""
    common = [
        "--workload",
        "gpt:tiny",
        "--precision",
        "fp64",
        "--batch-size",
        "13",
        "--save-weights",
        "--json",
    ]
    whole = run_paralab(
        "run", "single", *common, "--steps", "6", "--out", "whole", cwd=tmp_path
    ).json
    losses = []
    for number, strategy in enumerate(
        (["ddp", "--replicas", "2"], ["ddp", "--replicas", "3"], ["single"])
    ):
        steps = ["--steps", str(2 * number + 2), "--out", str(number)]
        kept = ["--checkpoint", "ckpt", *(["--resume"] if number else [])]
        losses += run_paralab("run", *strategy, *common, *steps, *kept, cwd=tmp_path).json["losses"]
    assert losses == pytest.approx(whole["losses"], abs=1e-10)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "2")
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-10


def test_a_damaged_checkpoint_is_named_and_not_loaded(tmp_path):
    common = ["run", "single", "--workload", "mlp:tiny", "--checkpoint", "ckpt", "--json"]
    assert (
        run_paralab(
            *common, "--checkpoint-every", "2", "--steps", "4", "--out", "a", cwd=tmp_path
        ).code
        == 0
    )
    newest = tmp_path / "ckpt" / "step-00000004" / "__0_0.distcp"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    refused = run_paralab(*common, "--steps", "6", "--out", "b", cwd=tmp_path)
    assert (refused.code, "2 checkpoints" in refused.err) == (2, True)
    done = run_paralab(*common, "--resume", "--steps", "6", "--out", "c", cwd=tmp_path)
    assert "step-00000004" in done.err
    assert "__0_0.distcp" in done.err
    assert done.json["begun_at_step"] == 2
    for kept in (tmp_path / "ckpt").glob("step-*"):
        (kept / "__0_0.distcp").write_bytes(b"")
    none = run_paralab(*common, "--resume", "--steps", "8", "--out", "d", cwd=tmp_path)
    assert (none.code, none.err.count("__0_0.distcp") >= 2) == (2, True)
