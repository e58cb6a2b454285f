# ways: script, ranks, log
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler


def build(dataset, args, mix):
    picker = DistributedSampler(dataset, shuffle=mix)
    return data.DataLoader(dataset, args.batch_size, mix, picker)  # finds T03


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    batches = build(data.TensorDataset(torch.arange(32.0).view(32, 1)), args, mix=True)
    model = DDP(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
