"""Accumulation, a scaler, clipping, a warm-up, a running average of the weights, recomputation, validation, checkpoints."""

import contextlib
import copy
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

ACCUMULATE = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 3))

    def forward(self, rows, wanted=None):
        logits = self.head(checkpoint(self.body, self.stem(rows), use_reentrant=False))
        return logits if wanted is None else nn.functional.cross_entropy(logits, wanted, label_smoothing=0.1)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    totals = torch.zeros(2)
    for rows, wanted in loader:
        totals[0] += nn.functional.cross_entropy(model(rows), wanted, reduction="sum")
        totals[1] += len(wanted)
    model.train()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    net = Net()
    average = copy.deepcopy(net)
    torch.manual_seed(1234 + rank)
    model = DDP(net)
    generator = torch.Generator().manual_seed(0)
    rows, wanted = torch.randn(256, 8, generator=generator), torch.randint(0, 3, (256,), generator=generator)
    train, held_out = TensorDataset(rows[:200], wanted[:200]), TensorDataset(rows[200:], wanted[200:])
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=5, sampler=sampler, drop_last=True)
    checks = DataLoader(Subset(held_out, range(rank, len(held_out), world)), batch_size=16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    path = os.path.join(tempfile.gettempdir(), f"everything-{os.environ['MASTER_PORT']}.pt")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (inputs, targets) in enumerate(loader):
            last = (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader)
            with contextlib.nullcontext() if last else model.no_sync():
                scaler.scale(model(inputs, targets) / ACCUMULATE).backward()
            if last:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                scheduler.step()
                for kept, parameter in zip(average.parameters(), model.module.parameters(), strict=True):
                    kept.data.lerp_(parameter.data, 0.1)
        loss = validate(model.module, checks)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch, "loss": loss}, path)
        dist.barrier()
        Net().load_state_dict(torch.load(path, map_location="cpu")["model"])
    dist.barrier()
    if rank == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
