"""paralab on a system without Linux's facilities, such as macOS.

The folder without_linux hides /proc, /sys, pidfd, core affinity, sequenced-packet sockets, and
the system's name from every process that has the folder on its PYTHONPATH. As in all tests, a
leftover process is a failure (conftest.py).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import DEADLINE_SECONDS, ROOT, run_paralab

MASK = Path(__file__).parent / "without_linux"
ENVIRONMENT = {"PYTHONPATH": f"{MASK}{os.pathsep}{ROOT}"}
TINY = ("--workload", "mlp:tiny", "--steps", "2")


@pytest.fixture
def masked(tmp_path, own_torch):
    def run(*arguments):
        done = run_paralab(*arguments, cwd=tmp_path, environment=ENVIRONMENT)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        return done

    return run


@pytest.mark.processes
def test_the_facts_of_the_host_are_known_or_none(tmp_path):
    code = """
import json, os, socket, sys
from pathlib import Path
from paralab.launch.processes import can_fork
from paralab.machine import host
from paralab.machine.processes import state_of

host.name_process("rank 0")
print(json.dumps({
    "hidden": [sys.platform, Path("/proc/self").exists(), hasattr(os, "pidfd_open")],
    "can_fork": can_fork(),
    "core_numbers": host.core_numbers(),
    "usable_cores": host.usable_cores(),
    "resident_bytes": host.resident_bytes(),
    "peak_resident_bytes": host.peak_resident_bytes(),
    "memory_bytes": host.memory_bytes(),
    "cpu_name": host.cpu_name(),
    "loopback_is_there": host.loopback() in [name for _, name in socket.if_nameindex()],
    "host_mark": host.host_mark(),
    "state": state_of(os.getpid()),
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["hidden"] == ["darwin", False, False]
    assert facts["can_fork"] is False
    assert facts["core_numbers"] == []
    assert facts["usable_cores"] == os.cpu_count()
    assert facts["resident_bytes"] is None
    assert facts["peak_resident_bytes"] > 0
    assert facts["memory_bytes"] > 0
    assert facts["cpu_name"]
    assert facts["loopback_is_there"]
    assert facts["host_mark"]
    assert facts["state"] in ("R", "S")


def test_run_and_show(masked, tmp_path):
    trained = masked("run", "ddp", *TINY, "--out", "run", "--json").json
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert logs == ["rank0.txt", "rank1.txt"]
    assert trained
    assert masked("show", "run", "--json").json


def test_compare(masked):
    rows = masked("compare", "single", "ddp", *TINY, "--rounds", "1", "--json").json["rows"]
    assert [row["strategy"] for row in rows] == ["single", "ddp"]


def test_verify(masked):
    masked("verify", "ddp", *TINY, "--accumulate", "1")  # exit code 0: all cases are equal


def test_practical_and_check(masked):
    masked("practical", "5", "--part", "4", *TINY, "--rounds", "1", "--out", "run")
    found = masked("practical", "check", "5", "run/sheet.md", "--run", "run", "--json").json
    [student] = found["students"]
    assert student["points"] == student["possible"] > 0


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path, own_torch):
    command = [sys.executable, "-m", "paralab", "run", "ddp", "--workload", "mlp:tiny"]
    with subprocess.Popen(
        [*command, "--steps", "1000000", "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        until = time.monotonic() + 100
        while not list(tmp_path.glob("run/**/rank1*.jsonl")):
            assert launcher.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
    assert len(ranks) == 2
    _, alive = psutil.wait_procs(ranks, timeout=DEADLINE_SECONDS)
    assert alive == []
