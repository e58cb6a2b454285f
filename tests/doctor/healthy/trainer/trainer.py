"""The loop: epochs, accumulation, validation on all ranks, early stopping by a joint decision, and
checkpoints from the first rank."""

import contextlib
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import (
    any_rank,
    average,
    get_world_size,
    is_distributed,
    is_main_process,
    main_process_only,
    synchronize,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger(__name__)


class Trainer:
    def __init__(self, model, loaders, options, device):
        self.options = options
        self.device = device
        self.train_loader, self.valid_loader, self.sampler = loaders
        self.folder = Path(options.folder)
        self.start_epoch = 0
        self.best = float("inf")
        self.bad_epochs = 0
        model = model.to(device)
        if is_distributed():
            if device.type == "cuda":
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            self.model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        else:
            self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        updates = options.epochs * (len(self.train_loader) // options.accumulate)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, max(1, updates))
        self.criterion = nn.CrossEntropyLoss()

    @property
    def unwrapped(self):
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def fit(self):
        self.resume()
        for epoch in range(self.start_epoch, self.options.epochs):
            if self.sampler is not None:
                self.sampler.set_epoch(epoch)
            train_loss = self.train_epoch()
            valid_loss, accuracy = self.validate()
            self.report(epoch, {"train": train_loss, "valid": valid_loss, "accuracy": accuracy})
            improved = valid_loss < self.best
            self.best = min(self.best, valid_loss)
            self.bad_epochs = 0 if improved else self.bad_epochs + 1
            self.save(epoch)
            synchronize()
            if any_rank(self.bad_epochs >= self.options.patience, self.device):
                break

    def train_epoch(self):
        self.model.train()
        total = torch.zeros((), device=self.device)
        batches = len(self.train_loader)
        self.optimizer.zero_grad(set_to_none=True)
        for index, (signal, label) in enumerate(self.train_loader):
            signal, label = signal.to(self.device, non_blocking=True), label.to(self.device, non_blocking=True)
            boundary = (index + 1) % self.options.accumulate == 0 or index + 1 == batches
            window = (
                self.options.accumulate
                if index < batches - batches % self.options.accumulate
                else batches % self.options.accumulate
            )
            quiet = self.model.no_sync() if is_distributed() and not boundary else contextlib.nullcontext()
            with quiet:
                loss = self.criterion(self.model(signal), label)
                (loss / window).backward()
            total += loss.detach()
            if boundary:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad(set_to_none=True)
        return average({"loss": total / batches})["loss"]

    @torch.inference_mode()
    def validate(self):
        self.model.eval()
        sums = torch.zeros(3, device=self.device)
        for signal, label in self.valid_loader:
            signal, label = signal.to(self.device), label.to(self.device)
            output = self.model(signal)
            sums[0] += nn.functional.cross_entropy(output, label, reduction="sum")
            sums[1] += (output.argmax(dim=1) == label).sum()
            sums[2] += len(label)
        if is_distributed():
            dist.all_reduce(sums, op=dist.ReduceOp.SUM)
        loss, right, count = sums.tolist()
        return loss / count, right / count

    @main_process_only
    def report(self, epoch, values):
        log.info("epoch %d on %d ranks: %s", epoch, get_world_size(), values)

    def save(self, epoch):
        if not is_main_process():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.unwrapped.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": epoch,
            "best": self.best,
        }
        new = self.folder / "last.tmp"
        torch.save(state, new)
        new.replace(self.folder / "last.pt")

    def resume(self):
        path = self.folder / "last.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.unwrapped.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.start_epoch, self.best = state["epoch"] + 1, state["best"]
