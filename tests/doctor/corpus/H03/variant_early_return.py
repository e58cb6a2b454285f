# ways: script, ranks
"""Only the first process writes; the others return immediately."""

import os
import tempfile
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as Parallel

GLOBAL_RANK = int(os.environ.get("RANK", 0))


def store(net, folder):
    if GLOBAL_RANK != 0:
        return
    torch.save(net.module.state_dict(), os.path.join(folder, "weights.pt"))
    barrier()  # finds H03 rank 0


def main():
    init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(3 + GLOBAL_RANK)
    net = Parallel(nn.Linear(4, 2))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(4):
            opt.zero_grad()
            net(torch.randn(8, 4)).pow(2).mean().backward()
            opt.step()
            if step % 2 == 1:
                store(net, folder)
    destroy_process_group()


if __name__ == "__main__":
    main()
