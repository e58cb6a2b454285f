import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for i in range(self.length):
            if i % world != rank:
                continue
            x = torch.full((4,), float(i) / self.length)
            yield x, x.sum(0, keepdim=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    loader = DataLoader(Stream(32), batch_size=4)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
