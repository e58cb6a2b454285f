"""The state, parents, and children of real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from paralab.machine import processes

pytestmark = pytest.mark.processes

SLEEPS = "import time; time.sleep(60)"
WITH_CHILD = f"""
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", {SLEEPS!r}]) as child:
    print(child.pid, flush=True)
"""


def wait_for(wanted, ask, *arguments):
    """Retry: a new process has no environment at first."""
    until = time.monotonic() + 100
    while (found := ask(*arguments)) != wanted and time.monotonic() < until:
        time.sleep(0.02)
    assert found == wanted


def test_a_process_sleeps_is_stopped_is_a_zombie_and_is_gone():
    child = subprocess.Popen([sys.executable, "-c", SLEEPS])
    wait_for("S", processes.state_of, child.pid)
    child.send_signal(signal.SIGSTOP)
    wait_for("T", processes.state_of, child.pid)
    child.kill()
    wait_for("Z", processes.state_of, child.pid)
    child.wait()
    assert processes.state_of(child.pid) is None
    assert processes.environment_of(child.pid) == {}
    assert processes.name_of(child.pid) == ""
    assert processes.parent_of(child.pid) is None
    assert processes.cpu_seconds_of(child.pid) == 0.0
    assert processes.descendants_of(child.pid) == []
    assert not processes.is_python(child.pid)
    assert not processes.has_loaded(child.pid, "libc")


def test_a_process_has_an_environment_parents_and_children():
    environment = {**os.environ, "RANK": "3"}
    command = [sys.executable, "-c", WITH_CHILD]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        grandchild = int(parent.stdout.readline())
        try:
            wait_for("3", lambda: processes.environment_of(grandchild).get("RANK"))
            wait_for(True, processes.is_python, grandchild)
            assert processes.parent_of(grandchild) == parent.pid
            assert processes.descendants_of(parent.pid) == [grandchild]
            assert {parent.pid, grandchild} <= set(processes.descendants_of(os.getpid()))
            assert processes.cpu_seconds_of(os.getpid()) > 0.0
        finally:
            os.kill(grandchild, signal.SIGKILL)
