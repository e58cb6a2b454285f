"""Practical 7, part 2: mixed precision with DDP, against float32 measured in the same run.

    torchrun --nproc_per_node=2 practicals/practical7_amp.py
    USE_SCALER=0 torchrun --nproc_per_node=2 practicals/practical7_amp.py     # the underflow is not repaired
    DTYPE=bfloat16 torchrun --nproc_per_node=2 practicals/practical7_amp.py   # float32's range, fewer digits

float16 has no number between 0 and 6e-8. Gradients of a small loss fall below it, become exactly
zero, and their weights stop learning. GradScaler multiplies the loss before backward and divides
the gradients after.
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

BATCH_SIZE = int(
    os.environ.get("BATCH_SIZE", 64)
)  # samples per optimizer step, over all ranks together
DIM = int(os.environ.get("DIM", 512))
STEPS = int(os.environ.get("STEPS", 10))
DTYPE = os.environ.get("DTYPE", "float16")  # or bfloat16
USE_SCALER = os.environ.get("USE_SCALER", "1") != "0"
LOSS_WEIGHT = float(
    os.environ.get("LOSS_WEIGHT", 1e-3)
)  # a small loss, so that the underflow can be seen
PROBE = """import torch
with torch.autocast("cpu", dtype=torch.{dtype}):
    torch.nn.Linear({dim}, {dim})(torch.ones({rows}, {dim})).float().sum().backward()"""


def usable_dtype(device: torch.device) -> torch.dtype:
    """DTYPE, unless this CPU cannot multiply in it. On some virtual machines the first such product
    kills the process (SIGILL: AMX instructions that the hypervisor forbids), so a child process
    tries it first."""
    if device.type == "cuda":
        return getattr(torch, DTYPE)
    for isa in (os.environ.get("ONEDNN_MAX_CPU_ISA", ""), "AVX512_CORE_FP16", "AVX512_CORE_BF16"):
        code = PROBE.format(dtype=DTYPE, dim=DIM, rows=BATCH_SIZE)
        env = os.environ | ({"ONEDNN_MAX_CPU_ISA": isa} if isa else {})
        if (
            subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).returncode
            == 0
        ):
            os.environ.update(env)  # read by oneDNN at its first product, which is still to come
            return getattr(torch, DTYPE)
    print(
        f"Remark: {DTYPE} products fail on this CPU: the 'mixed' rows below are float32\n",
        end="",
        flush=True,
    )
    return torch.float32


def set_up() -> torch.device:
    """Join the other ranks and choose this rank's device. Without torchrun: a group of one."""
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    device = torch.device(f"cuda:{local_rank % gpus}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    own_gpu = gpus >= int(
        os.environ.get("LOCAL_WORLD_SIZE", 1)
    )  # NCCL refuses two ranks on one GPU
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if own_gpu else "gloo", **alone)
    print(
        f"Rank: {dist.get_rank()} | Local Rank: {local_rank} | Device: {device}\n",
        end="",
        flush=True,
    )
    return device


def train(
    device: torch.device, dtype: torch.dtype, use_scaler: bool
) -> tuple[float, str, torch.Tensor]:
    """Train from the same weights on the same samples; return step time, other numbers, trained
    weights."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    wide, share = 4 * DIM, BATCH_SIZE // dist.get_world_size()
    layers = [
        nn.Linear(DIM, wide),
        nn.ReLU(),
        nn.Linear(wide, wide),
        nn.ReLU(),
        nn.Linear(wide, DIM),
    ]
    model = DDP(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / LOSS_WEIGHT, momentum=0.9)
    scaler = GradScaler(device.type, enabled=use_scaler)
    gc.collect()  # the previous model is gone: its memory must not count here
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
        scaler.step(
            optimizer
        )  # divides the gradients; skips the update when one of them overflowed
        scaler.update()  # halves the scale after an overflow, doubles it after 2000 good steps
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        step_seconds.append(time.perf_counter() - start)
    peak = (
        f"{torch.cuda.max_memory_allocated(device) >> 20} MiB"
        if device.type == "cuda"
        else "see below"
    )
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    row = f"{peak:>9} | {output.nbytes / 1024:5.0f} KiB | {loss / LOSS_WEIGHT:9.6f}"
    row += f" | {(grads == 0).sum():9d} ({(grads == 0).double().mean():5.1%})"
    median_ms = statistics.median(step_seconds[STEPS // 5 :]) * 1e3  # the first fifth is warm-up
    return median_ms, row, torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def main() -> None:
    device = set_up()
    dtype = usable_dtype(device)
    setups = [("float32", torch.float32, False), (f"{DTYPE}, NO GradScaler", dtype, False)]
    if USE_SCALER:
        setups.append((f"{DTYPE}, GradScaler", dtype, True))
    results = [train(device, dtype, use_scaler) for _, dtype, use_scaler in setups]
    if dist.get_rank() == 0:
        base_ms, _, base_weights = results[0]
        print(f"{base_weights.numel()} weights; {'step time':>21} | speed | peak mem. | output    "
              "| last loss | zero gradients    | weights off by")  # fmt: skip
        for (name, _, _), (ms, row, weights) in zip(setups, results, strict=True):
            off = (weights - base_weights).abs().max().item()
            print(f"{name:23} | {ms:8.2f} ms | {base_ms / ms:4.2f}x | {row} | {off:.1e}")
        if device.type == "cpu":
            print(
                "Memory: a CPU process has no peak per training; compare the size of one layer's output"
            )
    time.sleep(0.3)  # torch 2.13, gloo: a rank leaving right after a collective sometimes aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
