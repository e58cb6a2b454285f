"""NVIDIA's MPS, which lets multiple processes compute on one GPU at the same time. Without it, they
take turns.

The daemon belongs to a guard process with its own session. The guard stops the daemon when its
standard input closes, so the daemon also stops if paralab is killed.

    python -m paralab.machine.mps      (the guard)
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paralab.machine.child import command
from paralab.machine.precision import Probe
from paralab.machine.processes import descendants_of

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
START_SECONDS = 15.0
QUIT_SECONDS = 5.0


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Run an MPS daemon in this context, unless one is already running. Yield the environment
    variables that its clients need. Raise OSError if the daemon does not start."""
    if running_daemon():
        yield {}
        return
    with subprocess.Popen(
        command("paralab.machine.mps"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C must not stop the daemon before its clients
    ) as guard:
        assert guard.stdin
        assert guard.stdout
        readable, _, _ = select.select([guard.stdout], [], [], 2 * START_SECONDS)
        status, _, text = guard.stdout.readline().strip().partition(" ") if readable else ("",) * 3
        try:
            if status != "ready":
                raise OSError(text or f"{CONTROL} did not start within {START_SECONDS:g} s")
            yield {PIPES: text, LOGS: text}
        finally:
            guard.stdin.close()


def probe_mps() -> Probe:
    """Return whether an MPS daemon is already running or can be started."""
    if running := running_daemon():
        return Probe(True, f"a daemon is already running (process {running})")
    try:
        with mps_daemon():
            return Probe(True, "a trial daemon started")
    except OSError as error:
        return Probe(False, str(error))


def running_daemon() -> int | None:
    """Return the process ID of the daemon that CUDA programs here would use."""
    file = Path(os.environ.get(PIPES, "/tmp/nvidia-mps"), f"{CONTROL}.pid")
    try:
        pid = int(file.read_text())
    except (OSError, ValueError):
        return None
    return pid if Path("/proc", str(pid)).exists() else None


def main() -> None:
    """Run the daemon until standard input closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = tempfile.mkdtemp(prefix="paralab-mps-")
    environment = {**os.environ, PIPES: folder, LOGS: folder}
    daemon = None
    try:
        with Path(folder, "output.txt").open("wb") as output:
            daemon = subprocess.Popen(
                [CONTROL, "-f"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        _wait_until_ready(daemon, folder, environment)
        print("ready", folder, flush=True)
        sys.stdin.read()
    except FileNotFoundError:
        print(f"failed {CONTROL} is not installed", flush=True)
    except OSError as error:
        print("failed", error, flush=True)
    finally:
        if daemon:
            _stop(daemon, environment)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_ready(
    daemon: subprocess.Popen[bytes], folder: str, environment: dict[str, str]
) -> None:
    """Wait until the daemon answers. Raise OSError if it exits or does not answer in time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            words = Path(folder, "output.txt").read_text(errors="replace").split()
            raise OSError(f"{CONTROL} exited with code {daemon.returncode}: {' '.join(words)}")
        if Path(folder, "control").exists() and _tell(environment, "get_server_list"):
            return
        time.sleep(0.05)
    raise OSError(f"{CONTROL} did not answer within {START_SECONDS:g} s")


def _tell(environment: dict[str, str], words: str) -> bool:
    """Send the daemon a command. Return whether it answered."""
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [CONTROL],
            input=f"{words}\n".encode(),
            env=environment,
            capture_output=True,
            timeout=QUIT_SECONDS,
        )
        return done.returncode == 0
    return False


def _stop(daemon: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
    """Ask the daemon to quit. Then kill any of its processes that remain."""
    family = descendants_of(daemon.pid)
    _tell(environment, f"quit -t {QUIT_SECONDS:g}")
    with suppress(subprocess.TimeoutExpired):
        daemon.wait(QUIT_SECONDS)
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    daemon.kill()
    daemon.wait()


if __name__ == "__main__":
    main()
