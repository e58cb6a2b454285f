"""Signals: only the launcher handles them, ignored signals stay ignored, and a reported save is
complete."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest

from paralab.launch.stop import stop_in_order
from paralab.machine.signals import StopSignal, exit_code_of, name_of
from paralab.record.checkpoints import checkpoints
from tests.conftest import DEADLINE_SECONDS, ROOT, wait_until

WORKLOAD = """
import time, torch
from torch import nn
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, i):
        return torch.full((4,), i / 100_000), torch.zeros(4)

def loss(output, target):
    time.sleep(0.05)
    return nn.functional.mse_loss(output, target)

def workload():
    model = lambda: nn.Linear(4, 4)
    return {"model": model, "data": Numbers(), "loss": loss, "batch_size": 8, "loader_workers": 1}
"""
RUN = ["run", "ddp", "--workload", "w.py:workload", "--steps", "10000", "--out", "run"]


def begin(folder, *options, steps=3, **how):
    (folder / "w.py").write_text(WORKLOAD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
    process = subprocess.Popen(
        [sys.executable, "-m", "paralab", *RUN, *options], cwd=folder, env=environment, **how
    )
    wait_for(folder, steps)
    return process


def steps_of(folder, rank=0):
    path = folder / "run" / "events" / f"rank{rank}.jsonl"
    return path.read_text().count('"event":"step"') if path.exists() else 0


def wait_for(folder, steps):
    wait_until(lambda: steps_of(folder) >= steps)


def is_saved(folder):
    """Check that the last step that all ranks finished has an intact checkpoint."""
    reached = min(steps_of(folder, rank) for rank in (0, 1))
    return [(each.step, each.problem) for each in checkpoints(folder / "kept", check=True)] == [
        (reached, None)
    ]


@pytest.mark.usefixtures("own_torch")
def test_a_signal_to_every_process_at_once_saves(tmp_path):
    """Signal the template, the ranks, and their DataLoader workers too, as `scancel` does."""
    process = begin(tmp_path, "--checkpoint", "kept")
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(everybody) >= 1 + 1 + 2 + 2, everybody
    for each in reversed(everybody):  # the launcher last
        each.send_signal(signal.SIGTERM)
    for each in everybody[1:]:
        each.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 75, err
    assert "SIGTERM" in err
    assert not err.startswith("Ctrl-C")
    assert is_saved(tmp_path)


@pytest.mark.usefixtures("own_torch")
def test_a_closed_terminal_saves(tmp_path):
    """Writing to a closed terminal fails. The save must still succeed."""
    master, slave = os.openpty()

    def take_the_terminal():
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    how = {
        "stdin": slave,
        "stdout": slave,
        "stderr": slave,
        "start_new_session": True,
        "preexec_fn": take_the_terminal,
    }
    process = begin(tmp_path, "--checkpoint", "kept", **how)
    os.close(slave)
    os.close(master)
    assert process.wait(DEADLINE_SECONDS) == 75
    assert is_saved(tmp_path)


def ignore_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.usefixtures("own_torch")
def test_an_ignored_signal_stays_ignored_and_another_one_is_named(tmp_path):
    process = begin(tmp_path, "--json", preexec_fn=ignore_ctrl_c)  # as with `nohup … &`
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path, steps_of(tmp_path) + 10)
    process.send_signal(signal.SIGQUIT)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signal.SIGQUIT
    assert "SIGQUIT" in json.loads(out)["error"]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
)
def test_the_first_signal_requests_a_stop(number):
    before = signal.getsignal(number)
    with stop_in_order(enabled=True) as asked:
        signal.raise_signal(number)
        assert asked.signal == number
    assert signal.getsignal(number) == before
    assert (exit_code_of(number), name_of(number) == "Ctrl-C") == (
        128 + number,
        number == signal.SIGINT,
    )


@pytest.mark.parametrize(
    ("first", "second", "later", "stops"),
    [
        (signal.SIGTERM, signal.SIGINT, 0.1, True),
        (signal.SIGINT, signal.SIGINT, 0.1, True),
        (
            signal.SIGTERM,
            signal.SIGTERM,
            0.1,
            False,
        ),  # GNU timeout signals its child, then its process group
        (signal.SIGTERM, signal.SIGTERM, 60, True),
        (
            signal.SIGUSR1,
            signal.SIGTERM,
            60,
            False,
        ),  # Slurm: a warning, and the time limit a minute later
        (signal.SIGHUP, signal.SIGHUP, 60, False),
    ],
)
def test_the_second_signal(monkeypatch, first, second, later, stops):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopped = None
    with stop_in_order(enabled=True) as asked:
        signal.raise_signal(first)
        now[0] += later
        try:
            signal.raise_signal(second)
        except StopSignal as stop:
            stopped = stop.number
    assert (asked.signal, stopped) == (first, second if stops else None)


def test_an_ignored_signal_has_no_handler():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_in_order(enabled=True) as asked:
            signal.raise_signal(signal.SIGHUP)
        assert not asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
