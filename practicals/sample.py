"""Practical 10: hybrid parallelism, with data parallelism between ranks and model parallelism
within a rank.

    torchrun --nproc_per_node=2 practicals/sample.py
    MICRO_BATCHES=8 BATCH_SIZE=128 torchrun --nproc_per_node=2 practicals/sample.py
    python practicals/sample.py                                       # one process: no rank 1
    SAME_DEVICE=1 torchrun --nproc_per_node=2 practicals/sample.py    # no model parallelism

With 4 GPUs, rank 0 uses cuda:0 and cuda:2, and rank 1 uses cuda:1 and cuda:3. With fewer GPUs,
devices are shared or virtual, and the output says so. The trained weights are the same for any
number of ranks and micro-batches.
"""

import os
import statistics
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 64))  # samples per optimizer step, over all ranks
MICRO_BATCHES = int(os.environ.get("MICRO_BATCHES", 4))  # each rank splits its share into these
DIM = int(os.environ.get("DIM", 512))
STEPS = int(os.environ.get("STEPS", 30))
SAME_DEVICE = os.environ.get("SAME_DEVICE", "0") == "1"

DATA = torch.randn(4096, DIM, generator=torch.Generator().manual_seed(1))
counts: Counter[str] = Counter()  # this rank's passes and all-reduces


def choose_devices(local_rank: int, local_ranks: int) -> tuple[str, str, str]:
    """Return the devices for this rank's two stages, and a remark if they are shared or virtual."""
    gpus, stages = torch.cuda.device_count(), 2 * local_ranks
    if gpus >= 4 and local_ranks <= 2:
        device0 = torch.device(f"cuda:{local_rank}")
        device1 = torch.device(f"cuda:{local_rank + 2}")  # part 5: use cuda:{local_rank}
        return str(device0), str(device1), ""
    if gpus:
        remark = f" ({stages} stages share {gpus} GPU{'s'[: gpus != 1]})" if gpus < stages else ""
        return f"cuda:{local_rank % gpus}", f"cuda:{(local_rank + local_ranks) % gpus}", remark
    return f"cpu:{local_rank}", f"cpu:{local_rank + local_ranks}", " (virtual: no GPU)"


class TwoStages(nn.Module):
    """The other practicals' network, cut in two. Activations move between the devices."""

    def __init__(self, dim: int, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second, wide = first, second, 4 * dim
        self.stage0 = nn.Sequential(nn.Linear(dim, wide), nn.ReLU(), nn.Linear(wide, wide))
        self.stage1 = nn.Sequential(nn.ReLU(), nn.Linear(wide, dim)).to(second)
        self.stage0.to(first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # GPUs work asynchronously: stage 0 starts the next micro-batch while stage 1 is still busy.
        output = self.stage1(self.stage0(x.to(self.first)).to(self.second))
        counts["forward"] += 1
        output.register_hook(lambda gradient: counts.update(backward=1))  # when backward starts
        return output

    def gradient_norm(self) -> float:
        return sum(p.grad.double().square().sum().item() for p in self.parameters()) ** 0.5


def main() -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    first, second, remark = choose_devices(local_rank, local_ranks)
    second = first if SAME_DEVICE else second
    own_gpu = torch.cuda.device_count() >= local_ranks  # NCCL rejects two ranks on one GPU
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if own_gpu else "gloo", **alone)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:  # one write per line, so lines from two ranks cannot mix
        print(f"Rank: {rank} | {text}\n", end="", flush=True)

    stages = f"stage 0 on {first}, stage 1 on {second}{remark}"
    say(f"Local Rank: {local_rank} | World size: {ranks} | {stages}")
    torch.manual_seed(0)
    model = TwoStages(DIM, first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss_fn = nn.MSELoss()
    step_seconds: list[float] = []
    for step in range(STEPS):
        start = time.perf_counter()
        rows = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE) % len(DATA)
        share = DATA[rows.tensor_split(ranks)[rank]]
        micro_batches = share.tensor_split(min(MICRO_BATCHES, len(share)))
        optimizer.zero_grad()
        outputs = [model(x) for x in micro_batches]
        for number, (x, output) in enumerate(zip(micro_batches, outputs, strict=True), start=1):
            # Weight by samples, so that the average over the ranks is the entire batch's gradient,
            # even if shares or micro-batches differ in size.
            loss = loss_fn(output, x.roll(1, dims=1).to(second)) * (len(x) * ranks / BATCH_SIZE)
            loss.backward()
            if step == 0:
                part = f"{number}/{len(micro_batches)}"
                say(f"micro-batch {part}: {len(x)} samples, {first} -> {second}")
        norm = model.gradient_norm() if step == 0 else None
        # Synchronize once per step, after the last micro-batch.
        for p in model.parameters() if ranks > 1 else ():
            dist.all_reduce(p.grad)
            p.grad /= ranks
            counts["all-reduce"] += 1
        if step == 0:
            averaged = model.gradient_norm()
            say(f"gradient norm {norm:.6f} -> mean over all ranks {averaged:.6f}")
        optimizer.step()
        for device in {first, second} if torch.cuda.is_available() else ():
            torch.cuda.synchronize(device)
        step_seconds.append(time.perf_counter() - start)

    passes = f"{counts['forward']} forward and {counts['backward']} backward passes"
    used = f"{counts['all-reduce']} all-reduces, devices used: {len({first, second})}"
    say(f"{STEPS} steps: {passes}, {used}")
    rows = torch.arange(STEPS * BATCH_SIZE, (STEPS + 1) * BATCH_SIZE) % len(DATA)
    final_loss = loss_fn(model(DATA[rows]), DATA[rows].roll(1, dims=1).to(second)).item()
    median_ms = statistics.median(step_seconds[STEPS // 5 :]) * 1e3  # the first fifth is warm-up
    say(f"Step time: {median_ms:.2f} ms | Final loss: {final_loss:.6f} (on the next unseen batch)")
    if ranks == 1:
        say("one process: rank 0 takes the whole batch, and no synchronization happens")
    time.sleep(0.3)  # torch 2.13, gloo: a rank that exits right after a collective can abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
