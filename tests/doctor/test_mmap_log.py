"""Lines survive a killed process and a full disk, with and without posix_fallocate (macOS)."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

FILL = """
import os, resource, signal, sys
from pathlib import Path
from paralab.observe.mmap_log import PIECE, MmapLog

if sys.argv[2] == "without":
    del os.posix_fallocate
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PIECE, 2 * PIECE))  # as a full disk: EFBIG or ENOSPC
journal, line, written = MmapLog(Path(sys.argv[1])), b"x" * 99, 0
try:
    while True:
        journal.append(line)
        written += 1
except OSError:
    print(written, flush=True)
os._exit(0)  # without closing it
"""


@pytest.mark.parametrize("fallocate", ["with", "without"])
def test_a_full_disk_is_an_error_and_all_lines_before_it_stay(fallocate, tmp_path):
    path = tmp_path / "rank0.jsonl"
    if fallocate == "with" and not hasattr(os, "posix_fallocate"):
        pytest.skip("needs posix_fallocate")
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(path), fallocate],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = path.read_bytes().rstrip(b"\0").splitlines()
    assert lines == [b"x" * 99] * int(done.stdout)
    assert len(lines) > 1000
