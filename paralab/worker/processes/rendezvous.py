"""Rendezvous of all ranks: through a file if paralab started the ranks on one machine, or through a
store if torchrun or srun launched them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

CONNECT_SECONDS = 300  # a job's last node may start minutes after the first


def open_store(address: str, port: int, name: str, serve: bool = False) -> tuple[PrefixStore, int]:
    """Connect to the store, or serve it at this port (0: any). Return the store and its port."""
    timeout = timedelta(seconds=CONNECT_SECONDS)
    store = TCPStore(address, port, None, is_master=serve, timeout=timeout, wait_for_workers=False)
    return PrefixStore(name, store), int(store.port)


def join_group(rendezvous: str, world_size: int, rank: int) -> None:
    """Join the group of all ranks at `file:///PATH` or `tcp://ADDRESS:PORT/PREFIX`."""
    kind, _, rest = rendezvous.partition("://")
    where: dict[str, Any] = {"init_method": rendezvous}
    if kind == "tcp":
        host, _, prefix = rest.partition("/")
        address, _, port = host.rpartition(":")
        where = {"store": open_store(address, int(port), prefix)[0]}
    day = timedelta(days=1)
    dist.init_process_group("gloo", timeout=day, world_size=world_size, rank=rank, **where)
