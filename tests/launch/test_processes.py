"""Forked processes share one torch import and otherwise behave like directly started ones."""

import json
import os
import signal
import subprocess
from contextlib import contextmanager

import pytest

from paralab.launch import processes as starting
from paralab.launch.processes import INSIDE, Forked, import_torch_once, start
from paralab.record.status_board import UNKNOWN_CODE
from tests.conftest import DEADLINE_SECONDS, ROOT, run_paralab, wait_until

pytestmark = [
    pytest.mark.usefixtures("own_torch"),
    pytest.mark.skipif(not starting.can_fork(), reason="here every process is started by itself"),
]


@pytest.fixture(autouse=True)
def _block(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TAKEN", "yes")
    with import_torch_once():
        yield


@contextmanager
def child(folder, *arguments, **more):
    log = folder / "log.txt"
    environment = {**os.environ, INSIDE: "rank 3", "GIVEN": "this", "OMP_NUM_THREADS": "1"}
    del environment["TAKEN"]
    with log.open("ab") as file:
        process = start("tests.launch.child", list(arguments), environment, file, **more)
    try:
        wait_until(lambda: log.read_bytes().endswith(b"\n"))
        yield process, json.loads(log.read_text().splitlines()[0])
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)
        process.stdin.close()


def test_a_forked_process_is_like_a_started_one(tmp_path):
    told = []
    for own in (False, True):
        (tmp_path / str(own)).mkdir()
        with child(tmp_path / str(own), "one", "two", own=own) as (process, said):
            assert isinstance(process, subprocess.Popen if own else Forked)
            assert (said["pid"], said["session"]) == (process.pid, process.pid)
            assert process.poll() is None
            process.stdin.close()
            assert process.wait(DEADLINE_SECONDS) == process.poll() == process.returncode == 7
            told.append(
                {
                    key: said[key]
                    for key in ("threads", "arguments", "given", "taken", "descriptors")
                }
            )
    assert told[0] == told[1]
    assert told[0]["threads"] == 1
    assert (told[0]["given"], told[0]["taken"]) == ("this", None)
    (tmp_path / "other").mkdir()
    with child(tmp_path) as (_, one), child(tmp_path / "other") as (_, other):
        assert one["parent"] == other["parent"] != os.getpid()
        assert one["random"] != other["random"]


def test_every_exit_code_arrives(tmp_path):
    with child(tmp_path, "fail") as (process, _):
        assert process.wait(DEADLINE_SECONDS) == 1
        assert "ValueError: as asked" in (tmp_path / "log.txt").read_text()
    (tmp_path / "log.txt").unlink()
    with child(tmp_path, "hold") as (process, _):
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGKILL)
        assert process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
        process.kill()  # a no-op: the process is gone
    (tmp_path / "log.txt").unlink()
    with child(tmp_path) as (process, said):  # paralab replaces a killed template
        os.kill(said["parent"], signal.SIGKILL)
        assert process.wait(DEADLINE_SECONDS) == UNKNOWN_CODE
        os.kill(process.pid, signal.SIGKILL)  # it runs until the launcher closes its pipe
    (tmp_path / "log.txt").unlink()
    with child(tmp_path) as (_, again):
        assert again["parent"] not in (said["parent"], os.getpid())


def test_without_fork_each_process_imports_torch(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(starting, "DRIVER", tmp_path)
        with child(tmp_path) as (process, _):
            assert isinstance(process, subprocess.Popen)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", lambda pid: os.stat(""))  # an old kernel: OSError
        assert not starting.can_fork()
    with (tmp_path / "prefixed.txt").open("wb") as log:
        process = start(
            "tests.launch.child", [], dict(os.environ), log, prefix=["env", "GIVEN=prefix"]
        )
    assert isinstance(process, subprocess.Popen)
    process.stdin.close()
    assert process.wait(DEADLINE_SECONDS) == 7
    assert json.loads((tmp_path / "prefixed.txt").read_text())["given"] == "prefix"


def test_missing_torch_is_an_error_with_a_fix(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    done = run_paralab(
        "plan", "single", cwd=tmp_path, environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    assert done.code == 1
    assert "PyTorch is not installed for this Python." in done.err
    assert "pip install torch" in done.err
