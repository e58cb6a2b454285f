"""Practical 5, parts 2 to 7: train with `nn.DataParallel` and show how it splits the batch.

    python practicals/practical5_dp.py
    REPLICAS=3 python practicals/practical5_dp.py        # 64 samples over 3 devices: 22 / 22 / 20

With several GPUs, this is plain `nn.DataParallel`. With one GPU, `device_ids` lists that GPU
REPLICAS times. Without a GPU, `nn.DataParallel` would silently run the plain model, so we emulate
its algorithm on virtual devices.
"""

import copy
import importlib
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.func import functional_call

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 64))  # samples per optimizer step, over all devices
DIM = int(os.environ.get("DIM", 512))
STEPS = int(os.environ.get("STEPS", 30))
GPUS = torch.cuda.device_count()
REPLICAS = int(os.environ.get("REPLICAS", max(2, GPUS)))

# The same data as in practical5_single.py.
DATA = torch.randn(4096, DIM, generator=torch.Generator().manual_seed(1))
next_sample = 0
resource = importlib.import_module("resource") if os.name == "posix" else None  # process memory
print_lock = threading.Lock()  # each replica is a thread, and their lines must not mix


def get_batch(batch_size: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    global next_sample
    x = DATA[(next_sample + torch.arange(batch_size)) % len(DATA), :dim].to(device)
    next_sample += batch_size
    return x, x.roll(1, dims=1)


class Net(nn.Sequential):
    show_input = False  # True in the first step only, because printing takes time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Net.show_input:
            with print_lock:
                print(f"Inside model on device {x.device}, shape: {x.shape}")
        return super().forward(x)


class VirtualDataParallel(nn.Module):
    """The `nn.DataParallel` algorithm without GPUs. Each virtual device is a thread."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = module
        self.replicas = [copy.deepcopy(module) for _ in range(replicas)]
        self.threads = ThreadPoolExecutor(replicas)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = dict(self.module.named_parameters())
        # 1. scatter: equal chunks; the last device gets the rest
        chunks = x.chunk(len(self.replicas))
        # 2. replicate
        copies = [{name: p.clone() for name, p in parameters.items()} for _ in chunks]
        # 3. parallel apply
        outputs = list(self.threads.map(functional_call, self.replicas, copies, chunks))
        # 4. gather; backward then sums the copies' gradients on device 0
        return torch.cat(outputs)


def memory() -> str:
    if GPUS:  # device 0 also has the optimizer, all outputs, and the summed gradients
        peaks = [torch.cuda.max_memory_allocated(i) >> 20 for i in range(GPUS)]
        return ", ".join(f"{peak} MiB on cuda:{i}" for i, peak in enumerate(peaks))
    if resource is None:
        return "not measured: Windows has no `resource` module"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, but bytes on macOS
    mib = peak >> (20 if sys.platform == "darwin" else 10)
    return f"{mib} MiB peak of the whole process (no GPU: all replicas, Python, and PyTorch)"


def main() -> None:
    device = torch.device("cuda:0" if GPUS else "cpu")
    torch.manual_seed(0)  # the same initial weights in every practical
    wide = 4 * DIM
    layers = [nn.Linear(DIM, wide), nn.Linear(wide, wide), nn.Linear(wide, DIM)]
    network = Net(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    model: nn.Module = network.to(device)
    if GPUS:
        model = nn.DataParallel(model, device_ids=[i % GPUS for i in range(REPLICAS)])
        used = min(REPLICAS, GPUS)
        print(f"Configuration: nn.DataParallel | device_ids {model.device_ids} | real GPUs: {used}")
    else:
        model = VirtualDataParallel(model, REPLICAS)
        print(f"Configuration: DataParallel EMULATED | {REPLICAS} virtual devices share the CPU")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss_fn = nn.MSELoss()
    step_seconds: list[float] = []
    for step in range(STEPS):
        x, y = get_batch(BATCH_SIZE, DIM, device)
        Net.show_input = step == 0
        start = time.perf_counter()
        output = model(x)
        loss = loss_fn(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if GPUS:
            torch.cuda.synchronize(device)  # device 0 finishes last: it sums the gradients
        step_seconds.append(time.perf_counter() - start)

    Net.show_input = False
    x, y = get_batch(BATCH_SIZE, DIM, device)
    final_loss = loss_fn(model(x), y).item()
    median_ms = statistics.median(step_seconds[STEPS // 5 :]) * 1e3  # the first fifth is warm-up
    split = [len(chunk) for chunk in torch.arange(BATCH_SIZE).chunk(REPLICAS)]
    sizes, grad = "/".join(map(str, split)), next(model.parameters()).grad
    print(f"Devices used: {len(split)} | {BATCH_SIZE} samples by torch.chunk: {sizes}")
    print(f"Outputs gathered on {output.device}, gradients on {grad.device}")
    print(f"Step time: {median_ms:.2f} ms (median after warm-up)")
    print(f"Total training time: {sum(step_seconds):.3f} s")
    print(f"Memory: {memory()}")
    print(f"Final loss: {final_loss:.6f} (on the next unseen batch)")


if __name__ == "__main__":
    main()
