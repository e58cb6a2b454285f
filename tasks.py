"""Run this repository's tasks with plain Python: `python3 tasks.py TASK` or `make TASK`.

The first task that you run creates a virtual environment in .venv and installs the tested version
of each dependency (constraints.txt).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = str(BIN / "python")

# Debian package -> the command that it provides
SYSTEM = {"chromium": "chromium", "iproute2": "ip", "slurm-wlm": "sbatch", "munge": "munge"}

TASKS = {
    "setup": "create .venv and install paralab with all development tools",
    "demo": "compare eight configurations of a small transformer on this machine and write a page",
    "test": "lint and all tests; --quick skips tests that start processes (takes a minute)",
    "lint": "ruff and mypy",
    "bench": "compare paralab with hand-written loops, and run tune over a slow link",
    "faults": "inject each fault and report whether training survives (30 min; more as root)",
    "docs": "write docs/doctor/ from the doctor's catalog and docs/schema/ from the types",
    "site": "build the documentation site in site/; open site/index.html in a browser",
    "screenshots": "run a comparison and take the screenshots for the README",
    "gpu": "run every CUDA path on one GPU and print tables (with this Python if it has all packages)",
}


def run(*command: str) -> None:
    run_together(command)


def run_together(*commands: tuple[str, ...]) -> None:
    """Run commands at the same time. If a command fails, exit with its code after all have
    ended."""
    running = []
    for command in commands:
        print("$ " + " ".join(command).replace(str(ROOT) + os.sep, ""), flush=True)
        running.append(subprocess.Popen(command, cwd=ROOT))
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(next(code for code in codes if code))


def setup() -> None:
    """Install paralab and its tools, unless they are installed and the package list is
    unchanged."""
    wanted = hashlib.sha256(
        b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    ).hexdigest()
    done = VENV / "installed"
    if done.exists() and done.read_text() == wanted:
        return
    if not Path(PYTHON).exists():
        run(sys.executable, "-m", "venv", str(VENV))
    print("Installing PyTorch and the tools (once; a few minutes on a slow connection)", flush=True)
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
    """Install Chromium, iproute2, and Slurm for tests that need a browser, a rate-limited link, or
    a cluster. Without these packages, pytest skips those tests."""
    missing = [package for package, command in SYSTEM.items() if not shutil.which(command)]
    if not missing:
        return
    if not shutil.which("apt-get") or os.geteuid():
        print(
            f"Not installed (needs root and apt-get): {', '.join(missing)}. "
            "pytest skips the tests that need them.",
            flush=True,
        )
        return
    subprocess.run(["apt-get", "update", "-qq"], stdout=subprocess.DEVNULL)
    subprocess.run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
        stdout=subprocess.DEVNULL,
    )


MYPY = (PYTHON, "-m", "mypy")
PYTEST = (PYTHON, "-m", "pytest", "-q", "--durations=10")
FEW = 5  # run at most this many failed tests again, alone: the machine may have been busy


def lint() -> None:
    setup()
    ruff()
    run(*MYPY)


def ruff() -> None:
    run(PYTHON, "-m", "ruff", "check", ".")
    run(PYTHON, "-m", "ruff", "format", "--check", "--quiet", ".")


def test() -> None:
    arguments = [word for word in sys.argv[2:] if word != "--quick"]
    if "--quick" in sys.argv[2:]:
        setup()
        ruff()
        run_together(MYPY, (*PYTEST, "--numprocesses=2", "-m", "not processes", *arguments))
        return
    lint()
    system()
    # Use three processes even on two cores, because many tests wait. tests/conftest.py sorts the
    # files and runs each of them in one process.
    code = subprocess.run([*PYTEST, "--numprocesses=3", *arguments], cwd=ROOT).returncode
    failed = last_failed()
    if code == 1 and len(failed) <= FEW:
        print(f"Running alone: {', '.join(failed)}", flush=True)
        code = subprocess.run([*PYTEST, "--last-failed"], cwd=ROOT).returncode
        if code == 0:
            print(
                f"Failed alongside other tests, but passed alone: {', '.join(failed)}", flush=True
            )
    sys.exit(code)


def last_failed() -> list[str]:
    record = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return list(json.loads(record.read_text())) if record.exists() else []


def bench() -> None:
    setup()
    run(PYTHON, "bench/overhead.py")
    run(PYTHON, "bench/collectives.py")
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
    run(PYTHON, "docs/schemas.py")


def site() -> None:
    setup()
    run(PYTHON, "-m", "mkdocs", "build", "--strict")  # --quiet would also ignore warnings
    print(f"Open {ROOT / 'site' / 'index.html'} in a browser.")


def screenshots() -> None:
    setup()
    system()
    run(PYTHON, "docs/screenshots.py", *sys.argv[2:])


def gpu() -> None:
    is_complete = (
        subprocess.run(
            [sys.executable, "-c", "import torch, click, rich, msgspec, pytest, jsonschema"],
            capture_output=True,
        ).returncode
        == 0
    )
    if not is_complete:
        setup()
    run(sys.executable if is_complete else PYTHON, "bench/gpu.py")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (an older Python must print this message)
        sys.exit(f"paralab needs Python 3.11 or newer, but this is {sys.version.split()[0]}.")
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
