# ways: script, ranks, log
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(7)
    dataset = TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 1, generator=generator))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, sampler=sampler)  # finds T03
    torch.manual_seed(rank)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
