"""Run this under torchrun with 3 ranks. Something goes wrong in a collective. Each rank that
notices prints its error and the time it took, as JSON."""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paralab.collectives  # noqa: F401

fault = sys.argv[1]
torch.set_num_threads(1)
torch.set_default_device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
dist.init_process_group("local")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
dist.barrier()
begin = time.monotonic()
try:
    if fault == "killed" and rank == 1:
        work = dist.all_reduce(torch.ones(30_000_000), async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "killed":
        dist.all_reduce(torch.ones(30_000_000))
    elif fault == "sender" and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "sender":  # rank 1 waits for rank 0, and rank 2 waits for rank 1
        dist.recv(torch.ones(4), src=rank - 1)
    elif fault == "elsewhere":  # rank 0 waits for rank 2, which fails in its group with rank 1
        with_0, with_1 = dist.new_group([0, 2]), dist.new_group([1, 2])
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4), group=with_0 if rank == 0 else with_1)
    elif fault == "exits" and rank == 1:
        os._exit(0)
    elif fault == "raises" and rank == 1:
        raise SystemExit(3)
    elif fault == "ddp":
        model = DistributedDataParallel(torch.nn.Linear(2000, 2000))
        loss = model(torch.ones(4, 2000)).sum()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
    elif fault == "endless":
        peers = dist.group.WORLD._mesh.peers.values()
        addresses = {name for each in peers for name in (each.control.getsockname(),) if name}
        print(json.dumps(sorted(name.decode()[1:] for name in addresses)), flush=True)
        while True:
            dist.all_reduce(torch.ones(3_000_000))
    elif fault == "sizes":
        dist.all_reduce(torch.ones(4 + rank))
    else:
        dist.all_reduce(torch.ones(4))
except RuntimeError as error:
    report = {"rank": rank, "error": str(error), "seconds": time.monotonic() - begin}
    print(json.dumps(report) + "\n", end="", flush=True)
if fault != "raises":
    time.sleep(1)
