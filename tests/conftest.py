"""Run commands as users do, with deadlines, and fail a test that leaves a process behind. A test
is pure unless it is marked `processes`. A pure test that starts a process fails, so `python3
tasks.py test --quick`, which runs only pure tests, stays quick.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from docs.schemas import OUTPUTS, file_name
from paralab.launch.processes import SHARED, can_fork
from paralab.machine.signals import ENDS
from tests import forked

ROOT = Path(__file__).parent.parent
SESSION = "PARALAB_TEST_SESSION"  # in the environment of all processes that this session starts
os.environ[SESSION] = str(os.getpid())
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every command would compile paralab again
# OpenMP threads would spin while they wait, which takes four times the CPU time on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
for _number in ENDS:  # `nohup … &` ignores some signals, and the commands would inherit that
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)  # a handler is not inherited

# The files that take longest come first. If one of them started last, all others would wait for it.
LONGEST = (
    "parity/test_parallel",
    "doctor/test_rank_corpus",
    "parity/test_false",
    "slurm/",
    "doctor/test_ranks",
    "doctor/test_log_corpus",
    "launch/test_restart",
    "launch/test_joined",
    "parity/",
    "doctor/test_observing",
    "experiment/test_compare",
    "launch/test_endings",
    "show/test_trace_viewers",
    "show/test_page_in_chromium",
    "serve/test_pages_in_chromium",
    "practicals/",
    "test_install",
    "cli/",
    "course/",
)
STARTING_FIXTURES = {"paralab", "browser", "own_torch"}  # a test that uses one starts processes


@pytest.hookimpl(tryfirst=True)  # run this before `-m` selects tests by the marks that we add
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        starts = STARTING_FIXTURES & set(getattr(item, "fixturenames", ()))
        if starts or item.get_closest_marker("gpu"):
            item.add_marker("processes")
    items.sort(
        key=lambda item: next(
            (place for place, name in enumerate(LONGEST) if name in str(item.path)), len(LONGEST)
        )
    )
    _skip_without_gpu([item for item in items if item.get_closest_marker("gpu")])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests of a file in one worker, because they share launches. Pure tests do not."""
    from xdist.scheduler import LoadFileScheduling, LoadScheduling

    config.option.loadscopereorder = False  # keep our order
    pure = config.option.markexpr == "not processes"
    return (LoadScheduling if pure else LoadFileScheduling)(config, log)


def _skip_without_gpu(marked: list[pytest.Item]) -> None:
    """Import torch only if a test marked `gpu` was collected."""
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


# --- Pure tests do not start processes
# ---------------------------------------------------------------

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_pure: list[str] = []  # the pure test that is running, if any


def _refuse_to_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS and _pure:
        pytest.fail(f"{_pure[0]} starts a process ({event}): mark it with pytest.mark.processes")


sys.addaudithook(_refuse_to_start)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not item.get_closest_marker("processes"):
        _pure.append(item.nodeid)
    try:
        return (yield)
    finally:
        _pure.clear()


# --- One process imports torch, and all others are forked from it -------------------------------

_server = ExitStack()
_server_pids: list[int] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start that process before the first test that may need it."""
    if item.get_closest_marker("processes") and SHARED not in os.environ and can_fork():
        _server_pids.append(_server.enter_context(forked.server()).pid)


def pytest_sessionfinish() -> None:
    _server.close()


@pytest.fixture
def own_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """This test's commands import torch themselves, as a user's commands do."""
    monkeypatch.delenv(SHARED, raising=False)


# --- Tests do not leave processes behind
# ------------------------------------------------------------

_started: list[subprocess.Popen[Any]] = []  # processes that the running test started
_start = subprocess.Popen.__init__
_has_failed = pytest.StashKey[bool]()


def _start_and_note(process: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
    _start(process, *arguments, **options)
    _started.append(process)


subprocess.Popen.__init__ = _start_and_note  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[_has_failed] = report.failed or item.stash.get(_has_failed, False)
    return report


@pytest.fixture(autouse=True)
def _leaves_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process behind, and end that process. Python warns about an open
    process or pipe when it collects the object. A traceback keeps a failed test's objects alive,
    so the warning, which is an error, would hit a later test.
    """
    if not request.node.get_closest_marker("processes"):
        yield
        return
    _started.clear()
    yield
    left = [process.args for process in _started if process.returncode is None]
    for process in _started:
        if process.returncode is None or request.node.stash.get(_has_failed, False):
            _end(process)
    _started.clear()

    deadline = time.monotonic() + 30
    while ranks := [process for process in psutil.process_iter(["cmdline"]) if _is_rank(process)]:
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
            break
        time.sleep(0.1)
    if left or ranks:
        pytest.fail(f"left behind: {left} {ranks}")


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):  # nobody can read the unwritten bytes
                pipe.close()


def _is_rank(process: psutil.Process) -> bool:
    """Whether this session started the process, which may outlive its parent."""
    words = process.info["cmdline"] or []
    if process.pid in _server_pids or not any(word.startswith("paralab.worker") for word in words):
        return False
    try:
        return bool(process.environ().get(SESSION) == os.environ[SESSION])
    except psutil.Error:  # it has ended
        return False


# --- Running commands ---------------------------------------------------------------------------


DEADLINE_SECONDS = 200  # only ends a test that would wait forever


def wait_until(condition: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was never true"
        time.sleep(0.02)


class Finished:
    """What a command printed and how it ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def run_paralab(
    *arguments: str,
    cwd: Path,
    environment: dict[str, str] | None = None,
    seconds: float = DEADLINE_SECONDS,
) -> Finished:
    done = subprocess.run(
        [sys.executable, "-m", "paralab", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if "--json" in arguments:
        check_schema(arguments, done.stdout)
    return Finished(done)


@cache
def _validator(output: str) -> Any:
    path = ROOT / "docs" / "schema" / file_name(output)
    return jsonschema.Draft202012Validator(json.loads(path.read_text()))


def check_schema(arguments: Sequence[str], printed: str) -> None:
    """Every `--json` output must follow its published schema."""
    words = " ".join(arguments)
    if words.startswith("practical ") and not words.startswith("practical check"):
        words = "practical"
    names = [name for name in OUTPUTS if f"{words} ".startswith(f"{name} ")]
    if not names or not printed.startswith("{"):  # a usage error of click, or a killed process
        return

    value = json.loads(printed)
    name = "run --slurm --dry-run" if "script" in value else max(names, key=len)
    _validator("error" if "error" in value else name).validate(value)


@pytest.fixture
def paralab(tmp_path: Path) -> Callable[..., Finished]:
    """Run a command in an empty folder."""
    return lambda *arguments, **options: run_paralab(*arguments, cwd=tmp_path, **options)
