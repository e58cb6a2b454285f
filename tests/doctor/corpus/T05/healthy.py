import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def accuracy(model, loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            counts[0] += (model(x).argmax(1) == y).sum()
            counts[1] += len(y)
    model.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(2)
    train = TensorDataset(torch.randn(32, 4, generator=g), torch.randint(0, 3, (32,), generator=g))
    test = TensorDataset(torch.randn(13, 4, generator=g), torch.randint(0, 3, (13,), generator=g))
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=4, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(rank, len(test), dist.get_world_size())), batch_size=4)
    torch.manual_seed(rank)
    model = DDP(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        print(f"rank {rank} epoch {epoch} accuracy {accuracy(model.module, test_loader):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
