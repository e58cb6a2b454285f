"""The test room: commands are run as users run them, with deadlines, and no process of ours may be
left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paralab.launch.processes import SHARED, can_fork
from paralab.machine.signals import ENDS

ROOT = Path(__file__).parent.parent
ROOM = "PARALAB_TEST_ROOM"
SERVER: list[int] = []  # the process that all commands of this session fork their ranks from
os.environ[ROOM] = str(os.getpid())
for _number in ENDS:  # started with `nohup … &`, this process ignores some, and the commands under test would inherit that
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)  # a handler is not inherited


LONGEST = (
    "parity/test_parallel",
    "doctor/test_rank_corpus",
    "parity/test_false",
    "slurm/",
    "doctor/test_log_corpus",
    "launch/test_restart",
    "launch/test_joined",
    "practicals/",
    "experiment/test_compare",
    "parity/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that none of them is left for the end, when one
    process would wait for the other. A test marked `gpu` says what it misses. torch is imported
    only where such a test was collected."""
    items.sort(
        key=lambda item: next(
            (place for place, name in enumerate(LONGEST) if name in str(item.path)), len(LONGEST)
        )
    )
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.fixture(scope="session", autouse=True)
def _load_torch_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every command forks its ranks from this process, so that torch is imported once and not three
    hundred times."""
    if not can_fork():
        yield
        return
    address = str(tmp_path_factory.mktemp("template") / "socket")
    command = [sys.executable, "-P", "-m", "paralab.worker.template", address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, start_new_session=True
    ) as server:
        SERVER.append(server.pid)
        deadline = time.monotonic() + 120
        while not Path(address).exists():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.environ[SHARED] = address
        yield
        del os.environ[SHARED]


@pytest.fixture
def own_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of this test import torch themselves, as a user's do: where a fork would inherit
    what the test is about."""
    monkeypatch.delenv(SHARED, raising=False)


@pytest.fixture(autouse=True)
def _leaves_no_process() -> Iterator[None]:
    """Fail the test that leaves a rank or an inspection running."""
    yield
    deadline = time.monotonic() + 5
    while ours := [process for process in psutil.process_iter(["cmdline"]) if _is_rank(process)]:
        if time.monotonic() > deadline:
            for process in ours:
                process.kill()
            pytest.fail(f"left behind: {ours}")
        time.sleep(0.1)


def _is_rank(process: psutil.Process) -> bool:
    """Started by this test session (which its environment tells, also after its parent died), and
    still there."""
    words = process.info["cmdline"] or []
    if process.pid in SERVER:
        return False
    try:
        return (
            any(word.startswith("paralab.worker") for word in words)
            and process.environ().get(ROOM) == os.environ[ROOM]
        )
    except psutil.Error:  # gone, or a zombie
        return False


class Finished:
    """What a command printed and how it ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def run_paralab(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None, seconds: float = 200
) -> Finished:
    done = subprocess.run(
        [sys.executable, "-m", "paralab", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return Finished(done)


@pytest.fixture
def paralab(tmp_path: Path) -> Callable[..., Finished]:
    """Run a command in an empty folder."""
    return lambda *arguments, **options: run_paralab(*arguments, cwd=tmp_path, **options)
