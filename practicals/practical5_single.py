"""Practical 5, part 1: training on a single device, the baseline for every parallel run.

    python practicals/practical5_single.py

Look at the step time, the total training time, and the memory. `practical5_dp.py` trains the same
model on the same samples with `nn.DataParallel` and prints the same lines. You can change the
constants with environment variables:

    BATCH_SIZE=128 python practicals/practical5_single.py
"""

import importlib
import os
import statistics
import sys
import time

import torch
from torch import nn

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 64))  # samples per optimizer step
DIM = int(os.environ.get("DIM", 512))  # features per sample
STEPS = int(os.environ.get("STEPS", 30))  # optimizer steps
resource = importlib.import_module("resource") if os.name == "posix" else None  # process memory

# A fixed dataset. A sample counter, not the number of devices, determines which samples come next.
# So all practicals use the same samples in the same order, and you can compare their losses.
DATA = torch.randn(4096, DIM, generator=torch.Generator().manual_seed(1))
next_sample = 0


def get_batch(batch_size: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next `batch_size` samples. The task is to shift the features by one place."""
    global next_sample
    x = DATA[(next_sample + torch.arange(batch_size)) % len(DATA), :dim].to(device)
    next_sample += batch_size
    return x, x.roll(1, dims=1)


class Net(nn.Sequential):
    """Three linear layers with about 24 * DIM * DIM parameters."""

    show_input = False  # True in the first step only, because printing takes time

    def __init__(self, dim: int) -> None:
        wide = 4 * dim
        layers = [nn.Linear(dim, wide), nn.Linear(wide, wide), nn.Linear(wide, dim)]
        super().__init__(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Net.show_input:
            print(f"Inside model on device {x.device}, shape: {x.shape}")
        return super().forward(x)


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished its queued work, so that the measured time includes it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) >> 20} MiB on {device}"
    if resource is None:
        return "not measured: Windows has no `resource` module"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, but bytes on macOS
    mib = peak >> (20 if sys.platform == "darwin" else 10)
    return f"{mib} MiB peak of the whole process (no GPU: includes Python and PyTorch)"


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)  # the same initial weights in every practical
    model = Net(DIM).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss_fn = nn.MSELoss()
    print(f"Configuration: single | device {device} | batch {BATCH_SIZE} x {DIM} | {STEPS} steps")

    step_seconds: list[float] = []
    for step in range(STEPS):
        x, y = get_batch(BATCH_SIZE, DIM, device)
        Net.show_input = step == 0
        synchronize(device)
        start = time.perf_counter()

        output = model(x)
        loss = loss_fn(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        synchronize(device)
        step_seconds.append(time.perf_counter() - start)

    Net.show_input = False
    with torch.no_grad():
        x, y = get_batch(BATCH_SIZE, DIM, device)
        final_loss = loss_fn(model(x), y).item()
    median_ms = statistics.median(step_seconds[STEPS // 5 :]) * 1e3  # the first fifth is warm-up
    print("Devices used: 1")
    print(f"Step time: {median_ms:.2f} ms (median after warm-up)")
    print(f"Total training time: {sum(step_seconds):.3f} s")
    print(f"Memory: {memory(device)}")
    print(f"Final loss: {final_loss:.6f} (on the next unseen batch)")


if __name__ == "__main__":
    main()
