"""A process that imports torch and connects to the job's store on behalf of a launched process,
which never imports torch.

python -m paralab.worker.processes.store_client SOCKET        (started by paralab.launch.store)

Each line is one JSON object. The answer to {"id": 3, "do": "get", "name": "work", "seconds": 1} is
{"id": 3, "value": …} or {"id": 3, "lost": "why"}.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paralab.machine import signals
from paralab.machine.host import host_mark
from paralab.worker.processes.parent_watch import end_with_the_parent
from paralab.worker.processes.rendezvous import open_store


class StoreClient:
    """Exchanges short notes between ranks. Each note is JSON and has its own name."""

    _store: PrefixStore

    def open(self, address: str, port: int, prefix: str, serve: bool) -> int:
        """Open the store and return its port."""
        self._store, port = open_store(address, port, prefix, serve)
        return port

    def put(self, name: str, note: Any) -> None:
        with suppress(RuntimeError):  # the store is gone, so no process can read the note
            self._store.set(name, json.dumps(note))

    def has(self, name: str) -> bool:
        return bool(self._store.check([name]))

    def get(self, name: str, seconds: float) -> list[Any]:
        """Return a list with the note, or an empty list if the note does not arrive in time."""
        with suppress(RuntimeError):
            self._store.wait([name], timedelta(seconds=max(seconds, 0.001)))
        # `wait` raises the same error for a timeout and for a lost store. `check` raises only if
        # the store is lost.
        return [json.loads(self._store.get(name))] if self.has(name) else []

    def gpus(self) -> list[str]:
        """Return the NVML identifiers of the visible GPUs, without initializing CUDA."""
        number = torch.cuda.device_count() if torch.version.cuda else 0
        if not number:
            return []
        uuids: list[str] = []
        with suppress(AttributeError, OSError):  # a private torch function
            uuids = torch.cuda._raw_device_uuid_nvml() or []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(number)))
        words = [word.strip() for word in visible.split(",")]
        known = {str(index): uuid for index, uuid in enumerate(uuids)}
        return [known.get(word, f"{host_mark()} {word}") for word in words[:number]]


def answer(client: StoreClient, request: dict[str, Any]) -> dict[str, Any]:
    number, do = request.pop("id"), request.pop("do")
    try:
        return {"id": number, "value": getattr(client, do)(**request)}
    except RuntimeError as error:
        return {"id": number, "lost": str(error).splitlines()[0]}


def main() -> NoReturn:
    signals.ignore()
    end_with_the_parent()
    client = StoreClient()
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(sys.argv[1])
        with channel.makefile("rw", encoding="utf-8") as file:
            for line in file:
                file.write(json.dumps(answer(client, json.loads(line))) + "\n")
                file.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
