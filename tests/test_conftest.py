"""The rules that tests/conftest.py enforces, checked on tiny tests in a separate session."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

TESTS = """
import gc, os, subprocess, sys
import pytest

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

@pytest.mark.processes
def test_leaks_and_fails():
    process = subprocess.Popen(SLEEP, stdout=subprocess.PIPE)
    print("pid", process.pid)
    assert not process

@pytest.mark.processes
def test_ends_without_closing_and_fails():
    process = subprocess.Popen(["true"], stdout=subprocess.PIPE)
    assert process.wait()

@pytest.mark.processes
def test_leaks():
    process = subprocess.Popen(SLEEP)
    print("pid", process.pid)

def test_is_pure_and_starts_a_process():
    subprocess.run(["true"])

def test_is_pure_and_forks():
    os.fork()

@pytest.mark.processes
def test_is_fine():
    sys.last_value = sys.last_exc = sys.last_traceback = None
    gc.collect()
    subprocess.run(["true"], check=True)
"""


@pytest.mark.processes
def test_a_leaked_process_fails_its_own_test_alone_and_a_pure_test_starts_none(tmp_path):
    (tmp_path / "test_tiny.py").write_text(TESTS)
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-rA", "--tb=short", "test_tiny.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) \S*?::(\w+)", done.stdout, re.M)
    assert sorted(outcomes) == [
        ("ERROR", "test_leaks"),
        ("ERROR", "test_leaks_and_fails"),
        ("FAILED", "test_ends_without_closing_and_fails"),
        ("FAILED", "test_is_pure_and_forks"),
        ("FAILED", "test_is_pure_and_starts_a_process"),
        ("FAILED", "test_leaks_and_fails"),
        ("PASSED", "test_is_fine"),
        ("PASSED", "test_leaks"),
    ], done.stdout + done.stderr

    leaked = set(map(int, re.findall(r"^pid (\d+)", done.stdout, re.M)))
    assert len(leaked) == 2
    assert not [pid for pid in leaked if os.path.exists(f"/proc/{pid}")]
