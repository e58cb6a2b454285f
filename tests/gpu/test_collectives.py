"""The backend `local` with CUDA tensors: ranks that share a GPU exchange them through CUDA IPC."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.collectives.test_group import CHECKS, finish, passed_checks, start
from tests.conftest import ROOT, run_paralab, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.processes]
DAEMON = "nvidia-cuda-mps-control"


def test_torch_components_run_on_one_gpu():
    assert passed_checks("local", "cuda") == CHECKS


@pytest.mark.parametrize(
    ("fault", "culprit", "witnesses"),
    [
        ("killed", "Rank 1 died", [0, 2]),
        ("sizes", "Ranks make different calls", [0, 1, 2]),
        ("ddp", "Rank 1 died", [0, 2]),
    ],
)
def test_a_fault_names_the_culprit(fault, culprit, witnesses):
    _, outputs = finish(start("broken.py", fault, "cuda"))
    reports = [json.loads(line) for text, _ in outputs for line in text.splitlines()]
    assert sorted(report["rank"] for report in reports) == witnesses, outputs
    for report in reports:
        assert culprit in report["error"]
        assert report["seconds"] < 2


def test_no_gpu_memory_stays_behind_after_kill_9():
    free = torch.cuda.mem_get_info()[0]
    shared = shared_memory()
    processes = start("broken.py", "endless", "cuda")
    for each in processes:
        each.stdout.readline()
    wait_until(lambda: torch.cuda.mem_get_info()[0] < free - 300 * 2**20)
    for each in processes:
        each.send_signal(signal.SIGKILL)
    finish(processes)
    wait_until(lambda: torch.cuda.mem_get_info()[0] > free - 50 * 2**20)
    assert shared_memory() <= shared


def shared_memory():
    """Return the files in /dev/shm, except the CUDA driver's own."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("cuda.shm.")}


def test_the_launcher_removes_the_drivers_files_of_its_ranks(tmp_path):
    before = set(os.listdir("/dev/shm"))
    run_paralab(*"run ddp --workload mlp:tiny --steps 3 --device cuda".split(), cwd=tmp_path)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hybrid --schedule 1f1b"])
def test_every_strategy_with_ranks_on_one_gpu_trains_like_a_single_device(tmp_path, strategy):
    proof = run_paralab(
        "verify", *strategy.split(), "--workload", "gpt:tiny", "--device", "cuda", "--json",
        cwd=tmp_path,
    ).json  # fmt: skip
    assert proof["passed"]
    assert any(each["equal"] for each in proof["configurations"])


def daemons():
    """Return the daemon and its server. Linux cuts their names to 15 characters, and psutil completes
    them."""
    processes = [each.info for each in psutil.process_iter(["name", "status"])]
    alive = [each["name"] for each in processes if each["status"] != psutil.STATUS_ZOMBIE]
    return [name for name in alive if name and name.startswith(DAEMON[:15])]


RUN = ("run", "ddp", "--device", "cuda", "--mps", "--workload", "mlp:tiny")


def test_mps_runs_during_the_run_and_stops_with_it(tmp_path):
    result = run_paralab(*RUN, "--steps", "5", "--json", cwd=tmp_path).json
    plan = json.loads(Path(tmp_path, result["run_folder"], "manifest.json").read_text())["plan"]
    assert (plan["backend"], plan["mps"]) == ("local", True)
    wait_until(lambda: not daemons())


def test_mps_stops_even_if_paralab_is_killed(tmp_path):
    command = [sys.executable, "-m", "paralab", *RUN, "--steps", "1000000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as run:
        wait_until(lambda: daemons(), seconds=60)
        wait_until(lambda: list(tmp_path.glob("runs/*/events/rank0.jsonl")), seconds=60)
        run.kill()
    wait_until(lambda: not daemons(), seconds=30)
