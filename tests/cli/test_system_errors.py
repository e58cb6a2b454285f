"""System errors print no traceback: full disks, missing permissions, closed or ASCII streams."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from paralab.errors import from_os_error, naming
from tests.conftest import ROOT, run_paralab

pytestmark = pytest.mark.processes

RECORDED = ROOT / "tests" / "runs" / "ddp"


def in_shell(words, cwd, **environment):
    """Run a command line in a shell, with its redirections."""
    command = words.replace("paralab ", f"{sys.executable} -m paralab ", 1)
    known = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, shell=True, cwd=cwd, env=known, capture_output=True, timeout=200)


def test_ascii_only(tmp_path):
    done = in_shell(f"paralab show {RECORDED} --all", tmp_path, LANG="C", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert b"ddp x2 - accumulate 2" in done.stdout
    listed = in_shell(
        "paralab plan nonsense · 2>&1", tmp_path, LANG="C", PYTHONIOENCODING="ascii"
    )  # click itself prints this
    assert (listed.returncode, listed.stdout.isascii()) == (2, True)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path, closed):
    """None of our files gets the descriptor of a closed stream."""
    done = in_shell(f"paralab show {RECORDED} --report page.html {closed}", tmp_path)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    page = (tmp_path / "page.html").read_text()
    assert (page.lstrip()[:9].lower(), page.rstrip()[-7:]) == ("<!doctype", "</html>")


@pytest.mark.parametrize("options", ["", "--json"])
def test_a_full_disk_behind_the_standard_output(tmp_path, options):
    done = in_shell(f"paralab show {RECORDED} {options} > /dev/full", tmp_path)
    assert (done.returncode, b"Traceback" in done.stderr) == (1, False)
    assert b"standard output: No space left on device" in done.stderr


def test_a_reader_that_stops_early(tmp_path):
    done = in_shell(f"paralab show {RECORDED} --all | head -1", tmp_path)
    assert (len(done.stdout.splitlines()), done.stderr) == (1, b"")


@contextmanager
def small_disk(folder, kilobytes):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "paralab-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, and permission to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("kilobytes", "options", "file"),
    [
        (
            64,
            ["ddp", "--workload", "mlp:tiny", "--steps", "2000"],
            "/events/rank",
        ),  # the ranks' events, their logs, the result
        (
            2048,
            ["single", "--workload", "mlp", "--steps", "2", "--save-weights"],
            "small/run",
        ),  # torch does not report the reason
    ],
)
def test_a_full_disk_below_the_run_folder(tmp_path, kilobytes, options, file):
    with small_disk(tmp_path / "small", kilobytes) as small:
        done = run_paralab("run", *options, "--out", str(small / "run"), "--json", cwd=tmp_path)
    error = json.loads(done.out)["error"]
    assert (done.code, "No space left on device" in error, file in error) == (1, True, True), (
        done.err
    )
    assert "Traceback" not in done.err


def allowed():
    """Permissions do not apply to root unless it drops its capabilities."""
    if os.geteuid():
        return []
    if not shutil.which("setpriv"):
        pytest.skip("root needs setpriv to give its power away")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@pytest.fixture
def closed(tmp_path):
    """Create a locked folder with a run, a checkpoint, and some unreadable files."""
    shutil.copytree(RECORDED, tmp_path / "closed" / "run")
    shutil.copytree(RECORDED, tmp_path / "run")
    (tmp_path / "closed" / "kept" / "step-00000004").mkdir(parents=True)
    (tmp_path / "kept" / "step-00000004").mkdir(parents=True)
    (tmp_path / "kept" / "step-00000004" / "manifest.json").write_text("{}")
    (tmp_path / "w.py").write_text("")
    paths = [
        tmp_path / name
        for name in ("closed", "run/events", "kept/step-00000004/manifest.json", "w.py")
    ]
    before = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(0)
    yield tmp_path
    for path in paths:
        path.chmod(before[path])


@pytest.mark.parametrize(
    ("words", "codes", "file"),
    [
        (["show", "closed/run"], [2], "closed/run"),
        (["show", "run"], [1], "run/events"),
        (["checkpoint", "list", "closed/kept"], [1, 2], "closed/kept"),
        (["checkpoint", "list", "kept"], [0], "kept/step-00000004/manifest.json"),
        (
            ["run", "single", "--workload", "mlp:tiny", "--checkpoint", "closed/new"],
            [1, 2],
            "closed/new",
        ),
        (["run", "single", "--workload", "mlp:tiny", "--out", "closed/new"], [1, 2], "closed/new"),
        (["plan", "single", "--workload", "w.py:workload"], [2], "w.py"),
    ],
    ids=lambda value: (
        " ".join(value[:2]) if isinstance(value, list) and isinstance(value[0], str) else ""
    ),
)
@pytest.mark.usefixtures("own_torch")
def test_without_permission(closed, words, codes, file):
    command = [*allowed(), sys.executable, "-m", "paralab", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=closed, env=environment, capture_output=True, text=True, timeout=200
    )
    said = done.stdout + done.stderr
    assert done.returncode in codes, said
    assert (file in said, "Permission denied" in said, "Traceback" in said) == (
        True,
        True,
        False,
    ), said


def test_a_system_error_names_the_file(tmp_path):
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(OSError, match="No space") as raised,
    ):
        with naming(tmp_path / "there"):
            full.write(b"x")
    error = from_os_error(raised.value)
    assert error.problem == f"{tmp_path / 'there'}: No space left on device."
    assert error.fix
