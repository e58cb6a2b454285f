"""Everything one does with this repository, with nothing but Python: `python3 tasks.py TASK` (or
`make TASK`).

The first task makes a virtual environment in .venv and installs what the project needs, at the
tested versions (constraints.txt).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = str(BIN / "python")

SYSTEM = {
    "chromium": "chromium",
    "iproute2": "ip",
    "slurm-wlm": "sbatch",
    "munge": "munge",
}  # Debian's package, and the command it brings

TASKS = {
    "setup": "make .venv and install paralab with everything for development",
    "demo": "compare eight ways to train a small transformer on this machine, and write a page about it",
    "test": "lint, then all tests",
    "lint": "ruff and mypy",
    "bench": "paralab against loops written by hand, the cost of measuring, and tune over a slow link",
    "faults": "inject each fault and report whether training survives (30 minutes)",
    "docs": "write docs/doctor/ from the doctor's catalogue",
    "screenshots": "run a comparison and take the pictures of its page that the README shows",
    "gpu": "every CUDA path on one GPU, as a short table (uses the Python that runs this, if it has torch)",
}


def run(*command: str) -> None:
    print("$ " + " ".join(command).replace(str(ROOT) + os.sep, ""), flush=True)
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        sys.exit(code)


def setup() -> None:
    """Install once, and again when what is to be installed has changed."""
    wanted = hashlib.sha256(
        b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    ).hexdigest()
    done = VENV / "installed"
    if done.exists() and done.read_text() == wanted:
        return
    if not Path(PYTHON).exists():
        run(sys.executable, "-m", "venv", str(VENV))
    print("Installing PyTorch and the tools (once; a few minutes on a slow line)", flush=True)
    run(
        PYTHON,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        "constraints.txt",
        "--editable",
        ".[dev]",
    )
    done.write_text(wanted)


def demo() -> None:
    setup()
    run(PYTHON, "-m", "paralab", "compare", "--workload", "gpt")


def system() -> None:
    """Chromium, iproute2 and Slurm, for the tests that look at pages, lay cables and submit jobs;
    where they cannot be had, those tests say so."""
    missing = [package for package, command in SYSTEM.items() if not shutil.which(command)]
    if not missing:
        return
    if not shutil.which("apt-get") or os.geteuid():
        print(
            f"Not installed (needs root and apt-get): {', '.join(missing)}. The tests that need them are skipped.",
            flush=True,
        )
        return
    subprocess.run(["apt-get", "update", "-qq"], stdout=subprocess.DEVNULL)
    subprocess.run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
        stdout=subprocess.DEVNULL,
    )


def lint() -> None:
    setup()
    run(PYTHON, "-m", "ruff", "check", ".")
    run(PYTHON, "-m", "ruff", "format", "--check", "--quiet", ".")
    run(PYTHON, "-m", "mypy")


def test() -> None:
    lint()
    system()
    # A file's tests share launches, so a file stays in one process; the longest first
    # (tests/conftest.py).
    in_order = ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
    run(PYTHON, "-m", "pytest", "-q", "--durations=10", *in_order, *sys.argv[2:])


def bench() -> None:
    setup()
    run(PYTHON, "bench/overhead.py")
    run(PYTHON, "bench/measuring.py")
    run(PYTHON, "bench/checkpoint.py")
    run(PYTHON, "bench/cable.py")
    run(PYTHON, "bench/slow_link.py")


def faults() -> None:
    setup()
    system()
    run(PYTHON, "-m", "bench.faults.matrix", *sys.argv[2:])
    if len(sys.argv) == 2:
        run(PYTHON, "-m", "bench.faults.cluster")


def docs() -> None:
    setup()
    run(PYTHON, "docs/catalogue.py")


def screenshots() -> None:
    setup()
    system()
    run(PYTHON, "docs/screenshots.py", *sys.argv[2:])


def gpu() -> None:
    has_torch = (
        subprocess.run(
            [sys.executable, "-c", "import torch, click, rich"], capture_output=True
        ).returncode
        == 0
    )
    if not has_torch:
        setup()
    run(sys.executable if has_torch else PYTHON, "bench/gpu.py")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (an older Python must be told, not trip over the syntax)
        sys.exit(f"paralab needs Python 3.11 or newer; this is {sys.version.split()[0]}.")
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TASKS:
        print(
            "python3 tasks.py TASK, where TASK is one of\n"
            + "\n".join(f"  {task:<11} {about}" for task, about in TASKS.items())
        )
        sys.exit(0 if name in ("", "-h", "--help", "help") else 2)
    globals()[name]()


if __name__ == "__main__":
    main()
