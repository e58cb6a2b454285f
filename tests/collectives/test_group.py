"""The backend in real processes: torch's components run on it, and errors name the right rank."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import wait_until

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def start(script, *arguments, ranks=3):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        "PYTHONPATH": str(ROOT),
    }
    return [
        subprocess.Popen(
            [*forked.python(), str(HERE / script), *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(processes):
    """Return the exit codes and everything the ranks printed."""
    outputs = [process.communicate(timeout=120) for process in processes]
    return [process.returncode for process in processes], outputs


CHECKS = (
    "views",
    "public_functions",
    "objects",
    "subgroups",
    "point_to_point",
    "unusual_tensors",
    "tags",
    "any_source",
    "two_threads",
    "errors",
    "released",
    "ddp",
    "fsdp",
    "dtensor",
    "pipeline",
    "same_on_every_device",
    "large",
    "left_to_gloo",
    "again",
)


def passed_checks(*arguments):
    """Return the names of the checks in conformance.py that passed."""
    codes, outputs = finish(start("conformance.py", *arguments))
    assert codes == [0, 0, 0], outputs
    return tuple(line for line in outputs[0][0].splitlines() if line.isidentifier())


def test_torch_components_run_on_local():
    assert passed_checks("local") == CHECKS


def test_the_example_trains_on_local():
    codes, outputs = finish(start("../../examples/local_backend.py", ranks=2))
    assert codes == [0, 0], outputs
    losses = [float(line.split()[3]) for line in outputs[0][0].splitlines() if "over local" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize(
    ("fault", "culprit", "witnesses"),
    [
        ("killed", "Rank 1 died", [0, 2]),
        ("sender", "Rank 0 died", [1, 2]),
        ("elsewhere", "Rank 1 died", [0, 2]),
        ("exits", "Rank 1 died", [0, 2]),
        ("raises", "Rank 1 left the group", [0, 2]),
        ("sizes", "Ranks make different calls", [0, 1, 2]),
        ("ddp", "Rank 1 died", [0, 2]),
    ],
)
def test_a_fault_reaches_every_rank_and_names_the_culprit(fault, culprit, witnesses):
    _, outputs = finish(start("broken.py", fault))
    lines = [line for text, _ in outputs for line in text.splitlines()]
    reports = [json.loads(line) for line in lines if line.startswith("{")]  # gloo prints, too
    assert sorted(report["rank"] for report in reports) == witnesses, outputs
    for report in reports:
        assert culprit in report["error"]
        assert report["seconds"] < 10  # two on an idle machine; gloo's timeout is 30 minutes


def test_nothing_stays_behind_after_kill_9():
    processes = start("broken.py", "endless")
    addresses = [name for each in processes for name in json.loads(each.stdout.readline())]
    assert len(addresses) == 2  # ranks 0 and 1 are called by higher ranks
    assert all(name in Path("/proc/net/unix").read_text() for name in addresses)
    shared = set(os.listdir("/dev/shm"))
    for process in processes:
        process.send_signal(signal.SIGKILL)
    codes, _ = finish(processes)
    assert codes == [-signal.SIGKILL] * 3
    wait_until(lambda: set(os.listdir("/dev/shm")) <= shared)
    wait_until(lambda: not any(name in Path("/proc/net/unix").read_text() for name in addresses))
