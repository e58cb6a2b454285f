"""A generator and a critic, both in DDP, with a gradient penalty; evaluated on all ranks."""

import os

import torch
import torch.distributed as dist
from torch import autograd, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def reduce_mean(tensor):
    value = tensor.detach().clone()
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value / dist.get_world_size()


class Generator(nn.Module):
    def __init__(self, noise=8, size=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(noise, 32), nn.LayerNorm(32), nn.LeakyReLU(0.2), nn.Linear(32, size))

    def forward(self, noise):
        return self.layers(noise)


class Critic(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, sample):
        return self.layers(sample)


def penalty(critic, real, fake):
    mix = torch.rand(real.size(0), 1, device=real.device)
    between = (mix * real + (1 - mix) * fake.detach()).requires_grad_(True)
    slope = autograd.grad(critic(between).sum(), between, create_graph=True)[0]
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(1 + dist.get_rank())
    samples = torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(samples)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    generator = DistributedDataParallel(Generator().to(device), device_ids=[local_rank])
    critic = DistributedDataParallel(Critic().to(device), device_ids=[local_rank], broadcast_buffers=False)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9))
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for step, (real,) in enumerate(loader):
            real = real.to(device)
            with torch.no_grad():
                fake = generator(torch.randn(len(real), 8, device=device))
            critic_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            if step % 5 == 0:
                generator_loss = -critic.module(generator(torch.randn(len(real), 8, device=device))).mean()
                generator_optimizer.zero_grad()
                generator_loss.backward()
                generator_optimizer.step()
            shown = reduce_mean(critic_loss)
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {step}: critic {shown.item():.4f}")
        if dist.get_rank() == 0:
            torch.save({"generator": generator.module.state_dict(), "critic": critic.module.state_dict()}, f"gan-{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
