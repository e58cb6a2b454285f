"""Where ranks meet: a file, for those that paralab starts on one machine; a store at an address,
for those that were launched.

The launched ones also agree through that store on what is to be done, and tell how they ended.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from paralab.machine.host import host_mark

CONNECT_SECONDS = 300  # the slowest node of a job may come minutes after the first


class Lost(Exception):
    """The others did not say it in time, or the store is gone with the process that served it."""


class Rendezvous:
    """Short notes between ranks, as JSON, each under a name of its own."""

    def __init__(self, store: TCPStore, prefix: str) -> None:
        self.port = store.port
        self._store = PrefixStore(prefix, store)

    @classmethod
    def at(cls, address: str, port: int, prefix: str, serve: bool = False) -> Rendezvous:
        """Connect to the store there; `serve`: be that store (port 0: any that is free)."""
        patience = timedelta(seconds=CONNECT_SECONDS)
        try:
            store = TCPStore(
                address, port, None, is_master=serve, timeout=patience, wait_for_workers=False
            )
        except RuntimeError as error:
            raise Lost(str(error).splitlines()[0]) from error
        return cls(store, prefix)

    def put(self, name: str, note: Any) -> None:
        with suppress(RuntimeError):  # nobody is left to read it
            self._store.set(name, json.dumps(note))

    def get(self, name: str, seconds: float) -> Any:
        try:
            self._store.wait([name], timedelta(seconds=max(seconds, 0.001)))
            return json.loads(self._store.get(name))
        except RuntimeError as error:
            raise Lost(name) from error

    def has(self, name: str) -> bool:
        try:
            return bool(self._store.check([name]))
        except RuntimeError as error:
            raise Lost(name) from error


def join_group(meeting: str, world_size: int, rank: int) -> None:
    """The group of all ranks, met at `file:///PATH` or at `tcp://ADDRESS:PORT/PREFIX`."""
    kind, _, rest = meeting.partition("://")
    if kind == "file":
        dist.init_process_group("gloo", meeting, timedelta(days=1), world_size, rank)
        return
    where, _, prefix = rest.partition("/")
    address, _, port = where.rpartition(":")
    served = TCPStore(
        address, int(port), None, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS)
    )
    store = PrefixStore(prefix, served)
    dist.init_process_group(
        "gloo", timeout=timedelta(days=1), world_size=world_size, rank=rank, store=store
    )


def visible_gpus() -> list[str]:
    """What tells the GPUs that this process sees from all others, without touching them: NVML's
    identifiers."""
    number = torch.cuda.device_count() if torch.version.cuda else 0
    if not number:
        return []
    known: list[str] = []
    with suppress(AttributeError, OSError):  # of torch's own, and without a promise
        known = torch.cuda._raw_device_uuid_nvml() or []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = (
        [word.strip() for word in given.split(",")]
        if given is not None
        else [str(index) for index in range(number)]
    )
    found = [
        known[int(word)] if word.isdigit() and int(word) < len(known) else f"{host_mark()} {word}"
        for word in words
    ]
    return found[:number]
