"""Practical 7, part 2: compare mixed precision with float32 in the same DDP run.

    torchrun --nproc_per_node=2 practicals/practical7_amp.py
    USE_SCALER=0 torchrun --nproc_per_node=2 practicals/practical7_amp.py    # gradients underflow
    DTYPE=bfloat16 torchrun --nproc_per_node=2 practicals/practical7_amp.py  # the range of float32

float16 has no number between 0 and 6e-8. If the loss is small, many gradients are below that limit
and become zero, and their weights stop learning. GradScaler multiplies the loss before backward and
divides the gradients afterward.
"""

import gc
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 64))  # samples per optimizer step, over all ranks
DIM = int(os.environ.get("DIM", 512))
STEPS = int(os.environ.get("STEPS", 10))
DTYPE = os.environ.get("DTYPE", "float16")  # or bfloat16
USE_SCALER = os.environ.get("USE_SCALER", "1") != "0"
LOSS_WEIGHT = float(os.environ.get("LOSS_WEIGHT", 1e-3))  # a small loss makes underflow visible
PROBE = """import torch
with torch.autocast("cpu", dtype=torch.{dtype}):
    torch.nn.Linear({dim}, {dim})(torch.ones({rows}, {dim})).float().sum().backward()"""


def usable_dtype(device: torch.device) -> torch.dtype:
    """Return DTYPE, or float32 if this CPU cannot multiply in DTYPE.

    On some virtual machines, the hypervisor forbids AMX instructions, and the first such product
    kills the process (SIGILL). So a child process tries it first.
    """
    if device.type == "cuda":
        return getattr(torch, DTYPE)
    for isa in (os.environ.get("ONEDNN_MAX_CPU_ISA", ""), "AVX512_CORE_FP16", "AVX512_CORE_BF16"):
        code = PROBE.format(dtype=DTYPE, dim=DIM, rows=BATCH_SIZE)
        env = os.environ | ({"ONEDNN_MAX_CPU_ISA": isa} if isa else {})
        probe = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
        if probe.returncode == 0:
            os.environ.update(env)  # oneDNN reads this at its first product
            return getattr(torch, DTYPE)
    print(
        f"Remark: {DTYPE} products fail on this CPU: the 'mixed' rows below are float32", flush=True
    )
    return torch.float32


def set_up() -> torch.device:
    """Join the process group (or create a group of one) and choose this rank's device."""
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    device = torch.device(f"cuda:{local_rank % gpus}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    own_gpu = gpus >= local_ranks  # NCCL rejects two ranks on one GPU
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if own_gpu else "gloo", **alone)
    # One write per line, so lines from two ranks cannot mix.
    text = f"Rank: {dist.get_rank()} | Local Rank: {local_rank} | Device: {device}"
    print(f"{text}\n", end="", flush=True)
    return device


def train(
    device: torch.device, dtype: torch.dtype, use_scaler: bool
) -> tuple[float, str, torch.Tensor]:
    """Train, always from the same weights and on the same samples. Return the step time, the table
    row, and the weights."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    wide, share = 4 * DIM, BATCH_SIZE // dist.get_world_size()
    layers = [nn.Linear(DIM, wide), nn.Linear(wide, wide), nn.Linear(wide, DIM)]
    network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    model = DDP(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / LOSS_WEIGHT, momentum=0.9)
    scaler = GradScaler(device.type, enabled=use_scaler)
    gc.collect()  # free the previous model, so that its memory is not included
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step_seconds: list[float] = []
    for _ in range(STEPS):
        x = torch.randn(share, DIM, generator=data).to(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        with autocast(device_type=device.type, dtype=dtype, enabled=dtype != torch.float32):
            output = model(x)
            loss = nn.functional.mse_loss(output, x.roll(1, dims=1)) * LOSS_WEIGHT  # in float32
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # divides the gradients; skips the update after an overflow
        scaler.update()  # halves the scale after an overflow, doubles it after 2000 good steps
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        step_seconds.append(time.perf_counter() - start)
    peak = "see below"
    if device.type == "cuda":
        peak = f"{torch.cuda.max_memory_allocated(device) >> 20} MiB"
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    row = f"{peak:>9} | {output.nbytes / 1024:5.0f} KiB | {loss / LOSS_WEIGHT:9.6f}"
    row += f" | {(grads == 0).sum():9d} ({(grads == 0).double().mean():5.1%})"
    median_ms = statistics.median(step_seconds[STEPS // 5 :]) * 1e3  # the first fifth is warm-up
    return median_ms, row, torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def main() -> None:
    device = set_up()
    dtype = usable_dtype(device)
    configurations = [("float32", torch.float32, False), (f"{DTYPE}, NO GradScaler", dtype, False)]
    if USE_SCALER:
        configurations.append((f"{DTYPE}, GradScaler", dtype, True))
    results = [train(device, dtype, use_scaler) for _, dtype, use_scaler in configurations]
    if dist.get_rank() == 0:
        base_ms, _, base_weights = results[0]
        print(f"{base_weights.numel()} weights; {'step time':>21} | speed | peak mem. | output    "
              "| last loss | zero gradients    | weights off by")  # fmt: skip
        for (name, _, _), (ms, row, weights) in zip(configurations, results, strict=True):
            off = (weights - base_weights).abs().max().item()
            print(f"{name:23} | {ms:8.2f} ms | {base_ms / ms:4.2f}x | {row} | {off:.1e}")
        if device.type == "cpu":
            print("Memory: not measured per training on a CPU; compare the size of an output")
    time.sleep(0.3)  # torch 2.13, gloo: a rank that exits right after a collective can abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
