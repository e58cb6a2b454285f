"""The store through which a job's launched processes communicate. It is torch's TCPStore, served by
torchrun or rank 0.

Only torch can access the store, and this process must not import torch. So a child process
(`paralab.worker.processes.store_client`) accesses the store, and we talk to the child.
"""

import atexit
import json
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paralab.launch.launched_by import without_launch
from paralab.launch.processes import INSIDE, start

CONNECT_SECONDS = 300  # a job's slowest node may start minutes after the first
LOADING_SECONDS = 600  # how long the child may take to import torch
ENDED = "the process that imports torch ended"
SLICE_SECONDS = 1.0  # the child waits at most this long before it reads the next request


class Lost(Exception):
    """A note did not arrive in time, or the process that serves the store has exited."""


class Store:
    """Exchanges short notes between the processes in a job. Each note has its own name."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paralab-")
        address, log = Path(self._folder.name, "socket"), Path(self._folder.name, "log.txt")
        environment = {**without_launch(os.environ), INSIDE: "store client"}
        with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as file:
            listener.bind(str(address))
            listener.listen(1)
            module = "paralab.worker.processes.store_client"
            self._child = start(module, [str(address)], environment, file)
            atexit.register(self.close)
            self._channel = self._accept(listener, log)
        self._received = b""
        self._number = 0

    def _accept(self, listener: socket.socket, log: Path) -> socket.socket:
        until = time.monotonic() + LOADING_SECONDS
        listener.settimeout(0.2)
        while True:
            try:
                channel, _ = listener.accept()
            except TimeoutError:
                if self._child.poll() is not None or time.monotonic() > until:
                    raise Lost(f"{ENDED} {log.read_text(errors='replace').strip()}") from None
            else:
                channel.settimeout(None)
                return channel

    def open(self, address: str, port: int, prefix: str, serve: bool = False) -> int:
        """Connect to the store, or serve it (port 0: any free port). Return the port."""
        return int(self._ask("open", address=address, port=port, prefix=prefix, serve=serve))

    def put(self, name: str, note: Any) -> None:
        with suppress(Lost):  # no process is left to read the note
            self._ask("put", name=name, note=note)

    def has(self, name: str) -> bool:
        return bool(self._ask("has", name=name))

    def get(self, name: str, seconds: float) -> Any:
        """Wait for a note and return it. Raise Lost if it does not arrive in time."""
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            notes = self._ask("get", name=name, seconds=min(left, SLICE_SECONDS))
            if notes:
                return notes[0]
            if time.monotonic() >= until:
                raise Lost(name)

    def gpus(self) -> list[str]:
        """Return unique IDs of the GPUs that this process sees."""
        return list(self._ask("gpus"))

    def close(self) -> None:
        """Stop the child and any store that it serves."""
        atexit.unregister(self.close)
        if self._child.stdin:
            self._child.stdin.close()
        self._folder.cleanup()

    def _ask(self, do: str, **arguments: Any) -> Any:
        self._number += 1
        request = json.dumps({"id": self._number, "do": do, **arguments})
        try:
            self._channel.sendall(request.encode() + b"\n")
            answer = self._read_answer()
            # If a signal interrupted an earlier request, its answer arrives first: skip it.
            while answer.get("id") != self._number:
                answer = self._read_answer()
        except OSError as error:
            raise Lost(str(error)) from error
        if "lost" in answer:
            raise Lost(answer["lost"])
        return answer["value"]

    def _read_answer(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            data = self._channel.recv(1 << 16)
            if not data:
                raise Lost(ENDED)
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
