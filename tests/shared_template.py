"""A process that has imported torch, and forks a `paralab.worker.processes.template` for each command.

    python tests/shared_template.py SOCKET [MODULE…]      imports these modules as well

It ends when its stdin is closed. `tests/forked.py` starts it.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # as in the template

import importlib
import json
import os
import select
import signal
import socket
import sys
import weakref

from paralab.machine import signals
from paralab.worker.processes.template import serve


def share(address, modules):
    signals.ignore()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap the forked processes
    for name in ("paralab.worker.__main__", *modules):
        importlib.import_module(name)
    # At exit, each copy would remove torch's operators one by one, which takes 0.1 s.
    for each in weakref.finalize._registry:
        each.atexit = False
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen()
    while True:
        if sys.stdin in select.select([listening, sys.stdin], [], [])[0]:
            os._exit(0)
        connection, _ = listening.accept()
        with connection:
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                serve(receive(connection))


def receive(connection):
    """Take over a command's folder and environment, and return its socket."""
    message, [descriptor], _, _ = socket.recv_fds(connection, 1 << 20, 1)
    state = json.loads(message)
    os.chdir(state["folder"])
    os.environ.clear()
    os.environ.update(state["environment"])
    connection.send(b"1")
    connection.close()
    return socket.socket(fileno=descriptor)


if __name__ == "__main__":
    share(sys.argv[1], sys.argv[2:])
