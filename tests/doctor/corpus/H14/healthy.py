"""Some batches have images, and some do not."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Linear(8, 4)
        self.vision = nn.Linear(8, 4)

    def forward(self, text, picture):
        hidden = self.text(text)
        if picture.abs().sum() > 0:
            hidden = hidden + self.vision(picture)
        else:
            hidden = hidden + 0 * sum(parameter.sum() for parameter in self.vision.parameters())
        return hidden


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(64, 8, generator=generator)
    pictures[1::2] = 0
    data = TensorDataset(torch.randn(64, 8, generator=generator), pictures)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for text, picture in loader:
        loss = model(text, picture).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
