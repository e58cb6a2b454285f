import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(x), y) for x, y in loader]
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(5)
    train = TensorDataset(torch.randn(32, 4, generator=g), torch.randn(32, 1, generator=g))
    val = TensorDataset(torch.randn(16, 4, generator=g), torch.randn(16, 1, generator=g))
    train_loader = DataLoader(train, batch_size=4, sampler=DistributedSampler(train))
    val_loader = DataLoader(val, batch_size=4, sampler=DistributedSampler(val, shuffle=False))
    torch.manual_seed(rank)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(train_loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step % 2 == 1:
            print(f"rank {rank} step {step} validation {validate(model, val_loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
