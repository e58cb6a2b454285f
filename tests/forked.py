"""A replacement for `python` and `torchrun` whose processes do not need to import torch.

    python -S tests/forked.py 0 SCRIPT [ARGUMENT…]      like `python SCRIPT`; also `-m MODULE`
    python -S tests/forked.py 2 SCRIPT [ARGUMENT…]      like `torchrun --nproc_per_node=2 SCRIPT`

The test session runs one process that has imported torch (tests/conftest.py). This program asks
that process to fork copies, and waits for them. They print to our standard output and end when we
end.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 0.3  # how long other ranks may take to report a failure
KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG
START_SECONDS = 120
# Import what scripts and observed ranks use besides torch, so that the copies do not have to.
MODULES = (
    "tests.forked",
    "torch.utils.data",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.rpc",
    "torch.distributed.run",
    "paralab.observe.begin",
)


@contextlib.contextmanager
def server(modules=MODULES):
    """In this block, a process that has imported torch and these modules forks the processes of
    commands and of this program."""
    from paralab.launch.processes import SHARED

    with tempfile.TemporaryDirectory(prefix="torch-") as folder:
        address = os.path.join(folder, "socket")
        command = [sys.executable, "-P", "-m", "tests.shared_template", address, *modules]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, start_new_session=True
        ) as process:
            deadline = time.monotonic() + START_SECONDS
            while not os.path.exists(address):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            before, os.environ[SHARED] = os.environ.get(SHARED), address
            try:
                yield process
            finally:
                del os.environ[SHARED]
                if before is not None:
                    os.environ[SHARED] = before


def python(ranks: int = 0) -> list[str]:
    """Return the words that replace `python` or `torchrun --nproc_per_node=RANKS` in a command."""
    return [sys.executable, "-S", str(Path(__file__).resolve()), str(ranks)]


def start_and_wait(ranks: int, words: list[str]) -> int:
    """Start the processes and return an exit code. As under torchrun, one failure ends them all."""
    sys.path.insert(0, str(ROOT))
    from paralab.launch.processes import Template

    template = Template()
    common = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    if ranks:
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_port()}
        common.setdefault("OMP_NUM_THREADS", "1")

    started = []
    for rank in range(ranks or 1):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
        with open_log(rank) as log:
            started.append(template.fork("tests.forked", words, common | own, log))
    assert all(started), "the process with torch is gone"

    codes = {}
    while len(codes) < len(started) and not any(codes.values()):
        codes = {one.pid: code for one in started if (code := one.poll()) is not None}
        time.sleep(0.01)
    if len(codes) < len(started):
        time.sleep(GRACE_SECONDS)
    return max(map(abs, codes.values()))


_claims: list[socket.socket] = []


def find_port() -> str:
    """Return a free port that no other program gets until this process ends. Rank 0 listens on it
    only later. Until then, this process binds the port without listening, so that rank 0's store
    can bind it too (SO_REUSEADDR). The name of a Unix socket reserves the port against other
    processes that do the same.
    """
    for port in range(10000 + os.getpid() * 7 % 10000, 30000):
        claim, held = socket.socket(socket.AF_UNIX), socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            claim.bind(f"\0paralab-test-port-{port}")
            held.bind(("", port))  # on all addresses, as torch's store does
        except OSError:
            claim.close()
            held.close()
            continue
        _claims.extend((claim, held))
        return str(port)
    raise OSError("no free port")


def open_log(rank: int):
    """Each observed rank prints to a file in the folder, and all other processes to our standard
    output."""
    if folder := os.environ.get("PARALAB_OBSERVE"):
        return Path(folder, f"rank{rank}.txt").open("wb")
    return os.fdopen(os.dup(1), "wb")


def main() -> None:
    """Run the program in a forked copy as a new Python would. This does not return."""
    ctypes.CDLL(None).prctl(KILL_WITH_PARENT, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    if "RANK" not in os.environ:  # ranks that the script spawns are forked from it, also with torch
        processes = sys.modules["torch.multiprocessing"]
        processes.spawn = functools.partial(processes.start_processes, start_method="fork")

    if folder := os.environ.get("PARALAB_OBSERVE"):
        from paralab.observe.begin import begin

        begin(folder)
    code = 1
    try:
        run(sys.argv[1:])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(start_and_wait(int(sys.argv[1]), sys.argv[2:]))
