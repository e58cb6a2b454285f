"""Practical 7, part 1: gradient accumulation with DDP, and what `no_sync()` saves.

    torchrun --nproc_per_node=2 practicals/practical7_accumulation.py
    NO_SYNC=0 torchrun --nproc_per_node=2 practicals/practical7_accumulation.py  # without no_sync()

The optimizer updates the weights once every ACCUM_STEPS steps. With `no_sync()`, gradients stay
local until then (the ranks print different norms) and are all-reduced once. Without `no_sync()`,
every `backward()` runs an all-reduce. ACCUM_STEPS does not change the result if the number of
optimizer steps is the same.
"""

import contextlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 64))  # samples per OPTIMIZER step, over all ranks
ACCUM_STEPS = int(os.environ.get("ACCUM_STEPS", 4))  # forward/backward steps per optimizer step
DIM = int(os.environ.get("DIM", 512))
STEPS = int(os.environ.get("STEPS", 120))  # forward/backward passes: 30 optimizer steps
NO_SYNC = os.environ.get("NO_SYNC", "1") != "0"

# The same data as in practical5_single.py.
DATA = torch.randn(4096, DIM, generator=torch.Generator().manual_seed(1))
next_sample = 0


def get_batch(batch_size: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of the next samples. Rank 0 gets the first `batch_size` rows."""
    global next_sample
    rows = next_sample + dist.get_rank() * batch_size + torch.arange(batch_size)
    next_sample += dist.get_world_size() * batch_size
    x = DATA[rows % len(DATA), :dim].to(device)
    return x, x.roll(1, dims=1)


def set_up() -> torch.device:
    """Join the process group (or create a group of one) and choose this rank's device."""
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    device = torch.device(f"cuda:{local_rank % gpus}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    own_gpu = gpus >= local_ranks  # NCCL rejects two ranks on one GPU
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "nccl" if own_gpu else "gloo", device_id=device if own_gpu else None, **alone
    )
    # One write per line, so lines from two ranks cannot mix.
    text = f"Rank: {dist.get_rank()} | Local Rank: {local_rank} | Device: {device}"
    print(f"{text}\n", end="", flush=True)
    return device


def main() -> None:
    device = set_up()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro_batch = BATCH_SIZE // (world_size * ACCUM_STEPS)
    if micro_batch == 0 or STEPS < ACCUM_STEPS:
        smallest = world_size * ACCUM_STEPS
        raise SystemExit(f"set BATCH_SIZE={smallest} and STEPS={ACCUM_STEPS} or more")
    used, late = world_size * ACCUM_STEPS * micro_batch, STEPS % ACCUM_STEPS
    if rank == 0:
        parts = f"{ACCUM_STEPS} accumulation steps x {micro_batch} samples"
        print(f"{used} = {world_size} ranks x {parts}")
        if used != BATCH_SIZE or late:
            dropped = BATCH_SIZE - used
            print(f"Remark: dropping {dropped} samples per batch and the last {late} steps")
    torch.manual_seed(0)
    wide = 4 * DIM
    layers = [nn.Linear(DIM, wide), nn.Linear(wide, wide), nn.Linear(wide, DIM)]
    network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    model = DDP(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss_fn = nn.MSELoss()
    reduced_bytes: list[int] = []  # one entry per all-reduce

    def count(group: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced_bytes.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)  # DDP's default

    model.register_comm_hook(None, count)
    optimizer_steps = synchronized = 0
    cycle_seconds: list[float] = []  # a cycle is ACCUM_STEPS backward passes and one update
    for step in range(STEPS - late):
        x, y = get_batch(micro_batch, DIM, device)
        if step % ACCUM_STEPS == 0:
            start = time.perf_counter()
        before = len(reduced_bytes)
        last = (step + 1) % ACCUM_STEPS == 0
        # Only the last backward in a cycle must synchronize. Before that, gradients add up locally.
        with model.no_sync() if NO_SYNC and not last else contextlib.nullcontext():
            output = model(x)
            loss = loss_fn(output, y) / ACCUM_STEPS  # so the sum is the mean over the batch
            loss.backward()
        synchronized += len(reduced_bytes) > before
        if step < ACCUM_STEPS:  # first cycle: local norms differ, synchronized norms agree
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
            text = f"step {step + 1} | rank {rank} | gradient norm {norm:.9f}"
            text += f" | all-reduces: {len(reduced_bytes) - before}" + ", optimizer.step()" * last
            print(f"{text}\n", end="", flush=True)
        if (step + 1) % ACCUM_STEPS == 0:
            optimizer.step()
            optimizer.zero_grad()
            optimizer_steps += 1
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            cycle_seconds.append(time.perf_counter() - start)
    x, y = get_batch(BATCH_SIZE // world_size, DIM, device)
    final_loss = loss_fn(model.module(x), y).detach() / world_size
    dist.all_reduce(final_loss)
    if rank == 0:
        timed = cycle_seconds[len(cycle_seconds) // 5 :]  # skip the first fifth, which is warm-up
        median_ms = statistics.median(timed) * 1e3
        used_or_not, buckets = "used" if NO_SYNC else "REMOVED", len(reduced_bytes)
        print(f"no_sync() {used_or_not}: {synchronized} of {step + 1} steps synchronized")
        print(f"Optimizer steps: {optimizer_steps} | all-reduces: {buckets} (one per bucket)")
        print(f"Data all-reduced: {sum(reduced_bytes) / 1e6:.2f} MB per rank")
        print(f"Time per optimizer step: {median_ms:.2f} ms (median after warm-up)")
        print(f"Final loss: {final_loss.item():.6f} (on the next unseen batch)")
    time.sleep(0.3)  # torch 2.13, gloo: a rank that exits right after a collective can abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
