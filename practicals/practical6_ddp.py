"""Practical 6: DistributedDataParallel, with one process per device. Backward averages gradients.

    torchrun --nproc_per_node=2 practicals/practical6_ddp.py
    BUCKET_MB=4 torchrun --nproc_per_node=2 practicals/practical6_ddp.py     # smaller, more buckets

Each process prints its rank, its share of the batch, and its memory. Rank 0 also prints which
buckets DDP all-reduced, and when.
"""

import importlib
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 64))  # samples per optimizer step, over all ranks
DIM = int(os.environ.get("DIM", 512))
STEPS = int(os.environ.get("STEPS", 30))
BUCKET_MB = float(os.environ.get("BUCKET_MB", 25))  # size at which DDP closes a gradient bucket
resource = importlib.import_module("resource") if os.name == "posix" else None  # process memory
# The same data as in practical5_single.py.
DATA = torch.randn(4096, DIM, generator=torch.Generator().manual_seed(1))
next_sample = 0


def get_batch(batch_size: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of the next global batch. Rank 0 gets the first `batch_size` rows."""
    global next_sample
    rows = next_sample + dist.get_rank() * batch_size + torch.arange(batch_size)
    next_sample += dist.get_world_size() * batch_size
    x = DATA[rows % len(DATA), :dim].to(device)
    return x, x.roll(1, dims=1)


def set_up() -> torch.device:
    """Join the process group (or create a group of one) and choose this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    device = torch.device(f"cuda:{local_rank % gpus}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if gpus >= local_ranks else "gloo"  # NCCL rejects two ranks on one GPU
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None, **alone)
    ranks = f"Rank: {dist.get_rank()} | Local Rank: {local_rank}"
    ranks += f" | World size: {dist.get_world_size()}"
    shared = " (shared by the ranks)" if gpus < local_ranks else ""
    # One write per line, so lines from two ranks cannot mix.
    place = f"Device: {device}{shared} | Process: {os.getpid()} | {backend}"
    print(f"{ranks} | {place}\n", end="", flush=True)
    return device


def memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) >> 20} MiB peak of this rank on {device}"
    if resource is None:
        return "memory not measured: Windows has no `resource` module"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, but bytes on macOS
    mib = peak >> (20 if sys.platform == "darwin" else 10)
    return f"{mib} MiB peak of this process (no GPU: includes Python and PyTorch)"


def main() -> None:
    device = set_up()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > BATCH_SIZE:
        raise SystemExit(f"set BATCH_SIZE={world_size} or more: each rank needs a sample")
    torch.manual_seed(0)  # the same initial weights in every practical
    wide = 4 * DIM
    layers = [nn.Linear(DIM, wide), nn.Linear(wide, wide), nn.Linear(wide, DIM)]
    network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    model = DDP(network.to(device), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss_fn = nn.MSELoss()
    launched: list[tuple[int, float]] = []  # (bytes, time) of each all-reduce in the current step

    def watch(group: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Record an all-reduce. DDP calls this in backward when a bucket is complete."""
        launched.append((bucket.buffer().nbytes, time.perf_counter()))
        return allreduce_hook(group, bucket)  # DDP's default: average over the ranks

    model.register_comm_hook(None, watch)
    step_seconds: list[float] = []
    for _ in range(STEPS):
        x, y = get_batch(BATCH_SIZE // dist.get_world_size(), DIM, device)
        launched.clear()
        start = time.perf_counter()
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        backward_start = time.perf_counter()
        loss.backward()
        backward_seconds = time.perf_counter() - backward_start
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        step_seconds.append(time.perf_counter() - start)

    x, y = get_batch(BATCH_SIZE // dist.get_world_size(), DIM, device)
    final_loss = loss_fn(model.module(x), y).detach() / world_size
    dist.all_reduce(final_loss)  # the mean over the ranks, which have equal sample counts
    weights = sum(p.double().sum().item() for p in model.parameters())
    share = f"my share: {len(x)} of {BATCH_SIZE} samples"
    sums = f"sum of weights {weights:.9f}"
    print(f"Rank: {rank} | {share} | {sums} | {memory(device)}\n", end="", flush=True)
    dist.barrier()
    if rank == 0:
        for number, (size, moment) in enumerate(launched):
            when = (moment - backward_start) / backward_seconds
            bucket = f"{size / 1e6:.2f} MB, at {when:.0%} of backward()"
            print(f"All-reduce {number} of the last step: {bucket}")
        if BATCH_SIZE % world_size:
            used = f"{len(x) * world_size} of {BATCH_SIZE}"
            print(f"Remark: only {used} samples per step; the rest is dropped")
        median_ms = statistics.median(step_seconds[STEPS // 5 :]) * 1e3  # first fifth: warm-up
        print(f"Step time: {median_ms:.2f} ms (median after warm-up)")
        print(f"Total training time: {sum(step_seconds):.3f} s")
        print(f"Final loss: {final_loss.item():.6f} (on the next unseen batch)")
    time.sleep(0.3)  # torch 2.13, gloo: a rank that exits right after a collective can abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
