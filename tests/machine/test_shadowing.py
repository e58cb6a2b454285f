"""A file in the current folder never shadows a module: a torch.py there is not torch.

paralab once started child processes with `python -m`, which puts that folder first on sys.path."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from paralab.doctor.probes import two_ranks
from paralab.launch import torchrun as agent
from paralab.machine.child import command
from tests.conftest import ROOT

NAMES = ("torch", "random", "json", "numpy", "paralab")
WORKLOAD = """
import torch
from torch import nn
import beside

def workload():
    import imported_late
    return {"model": lambda: nn.Linear(4, 1), "data": (torch.randn(32, 4), torch.randn(32, 1)),
            "loss": nn.functional.mse_loss, "batch_size": beside.BATCH}
"""
TINY = ["--workload", "w.py:workload", "--steps", "2"]
COMMANDS = {
    "run": ["run", "ddp", "--replicas", "2", *TINY, "--checkpoint", "kept"],
    "verify": ["verify", "ddp", "--replicas", "2", *TINY, "--accumulate", "1"],
    "env": ["env"],  # also tries low precision in a process
    "list": ["list"],
}


@pytest.fixture
def room(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / name)!r} + '.mark', 'w').close()\n"
        )
    (tmp_path / "w.py").write_text(WORKLOAD)
    (tmp_path / "beside.py").write_text("BATCH = 8\n")
    (tmp_path / "imported_late.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.processes
def test_no_command_runs_a_file_that_shadows_a_module(room, name):
    console_script = [sys.executable, "-P", "-c", "from paralab.cli.main import main; main()"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*console_script, *COMMANDS[name]],
        cwd=room,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert not list(room.glob("*.mark"))


@pytest.mark.processes
def test_the_doctors_trials_do_not_either(room, monkeypatch):
    monkeypatch.chdir(room)
    torch, link = two_ranks("gloo")
    assert torch is not None
    assert link.problem is None
    assert not list(room.glob("*.mark"))


def test_torchrun_and_its_ranks_are_started_alike(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["paralab", "run", "ddp"])
    agent.become_torchrun(SimpleNamespace(world_size=2, threads_per_device=1), 0)
    (words,) = started
    assert words.count("-P") == 2
    assert words[-6:] == ["--no-python", *command("paralab", "run", "ddp")][-6:]


@pytest.mark.processes
def test_a_child_finds_the_package_anywhere(room):
    """The package is neither on PYTHONPATH nor installed (-S hides installed packages)."""
    words = command("paralab.machine.child")
    code = f"import sys, runpy; sys.argv = [{words[2]!r}, 'paralab.machine.peaks']; runpy.run_path({words[2]!r}, run_name='__main__')"
    done = subprocess.run(
        [words[0], words[1], "-I", "-S", "-c", code],
        cwd=room,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
