"""A process that has imported torch and forks ranks from itself, so that a case takes a second and
not six. Run as a program.

    python warm.py serve SOCKET             imports torch, then serves
    python -S warm.py SOCKET SCRIPT [ARG…]  two ranks of a script, started by the server; stands in for torchrun

The ranks belong to the client: when it goes, they go.
"""

import atexit
import contextlib
import functools
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import warnings

# WARM_RANKS: how many ranks (2); 0: one process that no launcher has started
PASSED_ON = (
    "PARALAB_OBSERVE",
    "PARALAB_TRIAL_STEPS",
    "PARALAB_TRIAL_CPU",
    "PYTHONPATH",
    "WARM_RANKS",
)


def client(path, script, *arguments):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        request = {
            "script": script,
            "arguments": arguments,
            "environment": environment,
            "cwd": os.getcwd(),
        }
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = connection.makefile().readline()
    return int(answer or 1)


def free_port():
    """One that no other case of this server picks at the same moment: it follows from the
    process."""
    for port in range(10000 + os.getpid() % 10000, 30000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise OSError("no free port")


def rank_of(request, rank, port):
    """In the forked child: the script, as torchrun would have started it. Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["cwd"])
        os.environ.update(request["environment"])
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if world := request["ranks"]:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_WORLD_SIZE=str(world),
            )
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
            sys.modules["torch"].set_num_threads(1)  # torch has read OMP_NUM_THREADS before
        else:  # ranks that the script starts itself are forked as well, and need not import torch again
            processes = sys.modules["torch.multiprocessing"]
            processes.spawn = functools.partial(processes.start_processes, start_method="fork")
        log = os.open(
            os.path.join(request["environment"].get("PARALAB_OBSERVE", "."), f"rank{rank}.txt"),
            os.O_CREAT | os.O_WRONLY,
        )
        os.dup2(log, 1)
        os.dup2(log, 2)
        warnings.resetwarnings()  # the server ignores those of imports; a rank shows its own
        sys.argv = [request["script"], *request["arguments"]]
        sys.path.insert(0, os.path.dirname(request["script"]))
        if "PARALAB_OBSERVE" in os.environ:
            from paralab.observe.begin import begin

            begin(os.environ["PARALAB_OBSERVE"])
        try:
            runpy.run_path(request["script"], run_name="__main__")
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    os.kill(os.getpid(), signal.SIGKILL) if code == "killed" else os._exit(code)


def serve_one(connection):
    request = json.loads(connection.makefile().readline())
    request["ranks"] = int(request["environment"].get("WARM_RANKS", "2"))
    port = free_port()
    ranks = []
    for rank in range(request["ranks"] or 1):
        pid = os.fork()
        if pid == 0:
            connection.close()
            rank_of(request, rank, port)
        ranks.append(pid)
    codes = {}
    try:
        while len(codes) < len(ranks):
            for pid in set(ranks) - set(codes):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if any(codes.values()):  # as torchrun does: one failed, the others are ended
                time.sleep(0.3)
                return 1
            gone, _, _ = select.select([connection], [], [], 0.02)
            if gone:
                return 1
        return max(abs(code) for code in codes.values())
    finally:
        for pid in set(ranks) - set(codes):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def serve(path):
    import importlib

    for name in (
        "torch",
        "torch.distributed",
        "torch.utils.data",
        "torch._dynamo",
        "torch.distributed.rpc",
        "torch.distributed.fsdp",
    ):
        importlib.import_module(name)
    importlib.import_module("paralab.observe.begin")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:  # closed: who has started us is gone
            return
        connection, _ = listening.accept()
        with connection:
            if os.fork() == 0:  # a process for each client: several at a time
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with contextlib.suppress(OSError):
                    connection.sendall(f"{serve_one(connection)}\n".encode())
                os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(client(*sys.argv[1:]))
