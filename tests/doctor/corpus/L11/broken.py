# ways: log
# start: never
"""Workers prefetch large images. Start this where /dev/shm is small, as in a container."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(index))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Pictures(), batch_size=4, num_workers=2)
    model = nn.Sequential(nn.Conv2d(3, 2, 3, stride=8), nn.Flatten(), nn.LazyLinear(1))
    optimizer = None
    for pictures in loader:  # finds L11
        loss = model(pictures).square().mean()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"finished with {loss.item():.3f}")


if __name__ == "__main__":
    main()
