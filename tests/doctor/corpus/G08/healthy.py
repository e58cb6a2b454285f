import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4
LENGTHS = [1, 3, 17, 32, 2, 30, 5, 8, 31, 1, 12, 4, 9, 26, 3, 14]


def sentences():
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 11, (16, 33), generator=generator)
    targets = tokens[:, 1:].clone()
    for row, length in enumerate(LENGTHS):
        targets[row, length:] = -100
    return TensorDataset(tokens[:, :-1], targets)


def main():
    dist.init_process_group("gloo")
    dataset = sentences()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=1, sampler=sampler)
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(loader)
        for first in range(0, len(batches), ACCUMULATE):
            window = batches[first : first + ACCUMULATE]
            count = torch.tensor(float(sum((targets != -100).sum() for _, targets in window)))
            dist.all_reduce(count)
            for k, (tokens, targets) in enumerate(window):
                with contextlib.nullcontext() if k == len(window) - 1 else model.no_sync():
                    loss = loss_fn(model(tokens).flatten(0, 1), targets.flatten())
                    (loss * dist.get_world_size() / count).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
