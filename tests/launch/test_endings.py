"""Success, failure, Ctrl-C, and kills leave a readable folder and no processes (a fixture checks
that), and the error names the root cause first."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paralab.analyse.hang import find_hang
from tests.conftest import DEADLINE_SECONDS, ROOT, run_paralab, wait_until

pytestmark = pytest.mark.processes

SLOW = """
import os, time, torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        time.sleep(0.05)
        if self.calls == 4 and os.environ["RANK"] == os.environ.get("FAILING_RANK"):
            self.fail()
        return self.layer(x)

    def fail(self):
        if os.environ.get("HOW") == "exit":
            os._exit(7)
        raise ValueError("a label that is no class")

def workload():
    return {"model": Slow, "data": (torch.randn(512, 4), torch.randn(512, 4)), "loss": nn.functional.mse_loss, "batch_size": 8}
"""


@pytest.fixture
def slow(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "paralab",
        "run",
        "ddp",
        "--workload",
        "slow.py:workload",
        "--out",
        "run",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(folder: Path, number: int) -> None:
    path = folder / "run" / "events" / "rank0.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count('"event":"step"') >= number)


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.name().startswith("rank ")
    ]


def test_ctrl_c_ends_all_ranks_and_leaves_a_readable_folder(slow):
    process = start(slow, "--steps", "10000")
    wait_for_steps(slow, 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130
    assert "Stopped by Ctrl-C after" in err
    assert "Traceback" not in err
    result = json.loads((slow / "run" / "result.json").read_text())
    assert result["steps"] >= 3
    assert result["status"] in ("interrupted", "killed")


def test_a_killed_launcher_leaves_no_orphans(slow, own_torch):  # inspects the command's processes
    process = start(slow, "--steps", "10000")
    wait_for_steps(slow, 2)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    process.communicate(timeout=DEADLINE_SECONDS)
    _, alive = psutil.wait_procs(ranks, timeout=DEADLINE_SECONDS)
    assert not alive
    events = (slow / "run" / "events" / "rank0.jsonl").read_text()
    assert events.count('"event":"step"') >= 2


def test_a_killed_rank_is_named(slow, own_torch):  # inspects the command's processes
    process = start(slow, "--steps", "10000")
    wait_for_steps(slow, 2)
    next(rank for rank in ranks_of(process) if rank.name() == "rank 1").kill()
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 1
    assert "Rank 1 failed in step" in err
    assert "was killed by SIGKILL" in err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_rank_that_failed_is_the_cause_with_the_users_line(slow, rank):
    environment = {"FAILING_RANK": rank}
    done = run_paralab(
        "run", "ddp", "--workload", "slow.py:workload", cwd=slow, environment=environment
    )
    assert done.code == 1
    assert f"Rank {rank} failed in step 3: ValueError: a label that is no class" in done.err
    assert "in fail" in done.err
    assert "Connection closed" not in done.err


def test_a_rank_that_exits_early_is_the_cause(slow):
    environment = {"FAILING_RANK": "1", "HOW": "exit"}
    done = run_paralab(
        "run", "ddp", "--workload", "slow.py:workload", cwd=slow, environment=environment
    )
    assert done.code == 1
    assert "Rank 1 failed in step 3: it exited with code 7" in done.err


FAILS_LATE = """
import os, torch
from torch import nn

class Late(nn.Module):
    def forward(self, x):
        if "RANK" in os.environ:  # only in a rank, not while the launcher inspects the workload
            raise ValueError("in the last stage")
        return x

def workload():
    model = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Late())
    return {"model": model, "data": (torch.randn(64, 4), torch.randn(64, 4)), "loss": nn.functional.mse_loss}
"""


def test_an_error_in_one_stage_of_a_pipeline_does_not_hang(tmp_path):
    (tmp_path / "late.py").write_text(FAILS_LATE)
    done = run_paralab(
        "run",
        "pipeline",
        "--workload",
        "late.py:workload",
        "--micro-batches",
        "4",
        cwd=tmp_path,
    )
    assert done.code == 1
    assert "ValueError: in the last stage" in done.err


MISMATCH = """
import os, torch
import torch.distributed as dist
from torch import nn

def loss(output, target):
    if os.environ.get("RANK") == "0":
        dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(6))
    elif os.environ.get("RANK") == "1":
        dist.all_gather_into_tensor(torch.zeros(6), torch.ones(3))
    return nn.functional.mse_loss(output, target)

def workload():
    return {"model": lambda: nn.Linear(4, 4), "data": (torch.randn(64, 4), torch.randn(64, 4)), "loss": loss}
"""


def test_a_mismatch_is_not_blamed_on_the_network(tmp_path):
    (tmp_path / "mismatch.py").write_text(MISMATCH)
    run = (
        "run",
        "ddp",
        "--workload",
        "mismatch.py:workload",
        "--step-deadline",
        "2",
        "--out",
        "run",
    )
    assert run_paralab(*run, cwd=tmp_path).code == 1
    hang = find_hang(tmp_path / "run" / "stacks" / "0", 2, late=[0, 1])
    assert hang.mismatch
    assert [call.record for _, call in hang.mismatch.came] == ["reduce_scatter", "all_gather"]
    assert ["mismatch.py:8" in hang.where, "mismatch.py:10" in hang.waiting] == [True, True]
