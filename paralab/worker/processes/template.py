"""Import torch once and fork all processes that a command needs.

python -m paralab.worker.processes.template DESCRIPTOR     (one end of a socket pair; the other end is at
                                                 paralab.launch.processes)

A template process never computes, so it has no threads that a fork would lose. It exits when the
launcher closes the other end of the socket.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()

import importlib
import json
import os
import random
import selectors
import socket
import sys
import traceback
from typing import Any, NoReturn

import torch
import torch._dynamo  # ranks and memory trials import it, which takes a second

from paralab.machine import signals
from paralab.worker.inspection import inspect_workload  # noqa: F401  # all commands start with it

MODULES = {"paralab.worker": "paralab.worker.__main__"}  # `python -m` runs this for a package


def main() -> NoReturn:
    signals.ignore()
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(channel: socket.socket) -> NoReturn:
    waiting = selectors.DefaultSelector()
    waiting.register(channel, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is channel:
                _fork(channel, waiting)
            else:
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                _report(channel, ended=key.data, code=os.waitstatus_to_exitcode(status))


def _fork(channel: socket.socket, waiting: selectors.BaseSelector) -> None:
    message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 2)
    if not message:
        os._exit(0)
    request = json.loads(message)
    module = importlib.import_module(MODULES.get(request["module"], request["module"]))
    gc.freeze()  # otherwise, garbage collection would copy shared pages by writing to them
    pid = os.fork()
    if not pid:
        for key in list(waiting.get_map().values()):
            os.close(key.fd)
        waiting.close()
        _become(module, request, *descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
    _report(channel, forked=pid)


def _become(module: Any, request: dict[str, Any], lifeline: int, log: int) -> NoReturn:
    """Set up the forked process like a newly started process, and run its module."""
    try:
        os.setsid()
        for descriptor, stream in ((lifeline, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, stream)
        os.close(lifeline)
        os.close(log)
        for name, value in request["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if threads := os.environ.get("OMP_NUM_THREADS", ""):
            torch.set_num_threads(int(threads))  # torch reads OMP_NUM_THREADS only on import
        random.seed()
        sys.argv = [str(module.__file__), *request["arguments"]]
        module.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _report(channel: socket.socket, **news: int) -> None:
    try:
        channel.send(json.dumps(news).encode())
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    main()
