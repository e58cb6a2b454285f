import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset


def evaluate(model, loader):
    # every rank looks at the whole validation set and comes to the same number
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.mse_loss(model(x), y).item()
    model.train()
    return total / len(loader)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(32, 4, generator=g), torch.randn(32, 1, generator=g))
    held_out = TensorDataset(torch.randn(8, 4, generator=g), torch.randn(8, 1, generator=g))
    mine = Subset(data, range(rank, len(data) // world * world, world))
    train_loader = DataLoader(mine, batch_size=4, shuffle=True)
    val_loader = DataLoader(held_out, batch_size=4)
    torch.manual_seed(10 + rank)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        print(f"rank {rank}: validation {evaluate(model, val_loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
