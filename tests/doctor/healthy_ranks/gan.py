"""A generator and a discriminator; the discriminator learns from two losses in one step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 4


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    points = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(points)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(10 + rank)
    generator = DDP(nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 6)))
    critic = DDP(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid()))
    loss_fn = nn.MSELoss()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            critic.zero_grad()
            loss_real = loss_fn(critic(real), ones)
            loss_real.backward()
            fake = generator(torch.randn(len(real), NOISE))
            loss_fake = loss_fn(critic(fake.detach()), zeros)
            loss_fake.backward()
            optimizer_c.step()
            generator.zero_grad()
            loss_g = loss_fn(critic(fake), ones)
            loss_g.backward()
            optimizer_g.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
