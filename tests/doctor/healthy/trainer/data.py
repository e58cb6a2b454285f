"""The data and its loaders."""

import torch
from distributed import is_distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset):
    def __init__(self, count, seed, noise=0.0):
        generator = torch.Generator().manual_seed(seed)
        self.phase = torch.rand(count, generator=generator) * 6.28
        self.kind = torch.randint(0, 4, (count,), generator=generator)
        self.noise = noise

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, index):
        time = torch.linspace(0, 6.28, 64)
        wave = torch.sin((self.kind[index] + 1) * time + self.phase[index])
        return (wave + self.noise * torch.randn(64)).unsqueeze(0), self.kind[index]


def make_loaders(options):
    train, valid = Waves(4096, seed=0, noise=0.1), Waves(512, seed=1)
    train_sampler = DistributedSampler(train, drop_last=True) if is_distributed() else None
    valid_sampler = DistributedSampler(valid, shuffle=False, drop_last=True) if is_distributed() else None
    common = {"num_workers": options.workers, "pin_memory": torch.cuda.is_available()}
    return (
        DataLoader(train, options.batch_size, shuffle=train_sampler is None, sampler=train_sampler, drop_last=True, **common),
        DataLoader(valid, options.batch_size, sampler=valid_sampler, **common),
        train_sampler,
    )
