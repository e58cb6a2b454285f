"""Starts one process per GPU, trains with snapshots, and shares a checkpoint between ranks."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.data = [(torch.rand(20, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(20, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 1)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


class Trainer:
    def __init__(self, model, train_data, optimizer, gpu_id, save_every, snapshot_path):
        self.gpu_id = gpu_id
        self.model = model.to(gpu_id)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.model = DDP(self.model, device_ids=[self.gpu_id])

    def _load_snapshot(self, path):
        snapshot = torch.load(path, map_location=f"cuda:{self.gpu_id}")
        self.model.load_state_dict(snapshot["model"])
        self.epochs_run = snapshot["epochs"]

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        size = len(next(iter(self.train_data))[0])
        print(f"[GPU{self.gpu_id}] epoch {epoch} | batch {size} | steps {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source.to(self.gpu_id), targets.to(self.gpu_id))

    def _save_snapshot(self, epoch):
        torch.save({"model": self.model.module.state_dict(), "epochs": epoch}, self.snapshot_path)
        print(f"epoch {epoch} | snapshot saved at {self.snapshot_path}")

    def train(self, most):
        for epoch in range(self.epochs_run, most):
            self._run_epoch(epoch)
            if self.gpu_id == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)


def set_up(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def clean_up():
    dist.destroy_process_group()


def share_a_checkpoint(rank):
    model = Toy().to(rank)
    wrapped = DDP(model, device_ids=[rank])
    path = os.path.join(tempfile.gettempdir(), "toy.checkpoint")
    if rank == 0:
        torch.save(wrapped.state_dict(), path)
    dist.barrier()
    wrapped.load_state_dict(torch.load(path, map_location={"cuda:0": f"cuda:{rank}"}, weights_only=True))
    optimizer = optim.SGD(wrapped.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = wrapped(torch.randn(20, 20, device=rank))
    nn.MSELoss()(outputs, torch.randn(20, 1, device=rank)).backward()
    optimizer.step()
    dist.barrier()
    if rank == 0:
        os.remove(path)


def main(rank, world_size, save_every, total_epochs, batch_size):
    set_up(rank, world_size)
    data = Points(2048)
    model = Toy()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, pin_memory=True, shuffle=False, sampler=sampler)
    Trainer(model, loader, optimizer, rank, save_every, "snapshot.pt").train(total_epochs)
    share_a_checkpoint(rank)
    clean_up()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", default=32, type=int)
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    mp.spawn(main, args=(gpus, args.save_every, args.total_epochs, args.batch_size), nprocs=gpus)
