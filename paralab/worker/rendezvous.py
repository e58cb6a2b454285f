"""Let all ranks rendezvous: through a file if paralab started them on one machine, or through a
store if torchrun or srun launched them."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

CONNECT_SECONDS = 300  # a job's slowest node may start minutes after its first


def join_group(rendezvous: str, world_size: int, rank: int) -> None:
    """Join all other ranks in one group at `file:///PATH` or at `tcp://ADDRESS:PORT/PREFIX`."""
    kind, _, rest = rendezvous.partition("://")
    if kind == "file":
        dist.init_process_group("gloo", rendezvous, timedelta(days=1), world_size, rank)
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
