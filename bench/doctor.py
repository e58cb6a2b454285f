"""What it costs a training to be observed by the doctor: blocks of steps with and without, in turns, in the same ranks.

python bench/doctor.py      two CPU ranks, DDP; one line per width of the model: median of the blocks' ratios
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WIDTHS = (256, 512, 1024)
BLOCK = 64  # steps: one of them is sampled with digests
PAIRS = 12
BATCH = 64


def main() -> None:
    for width in WIDTHS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        with tempfile.TemporaryDirectory() as folder:
            common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, str(width), folder]
            ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
            codes = [rank.wait() for rank in ranks]
            assert codes == [0, 0], codes


def rank(width: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from paralab.observe.begin import begin

    observed = begin(folder)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    samples = BATCH * 2 * BLOCK
    data = TensorDataset(torch.randn(samples, 64), torch.randint(0, 10, (samples,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def block(number: int) -> tuple[float, float]:
        """One pass over the loader: BLOCK steps."""
        sampler.set_epoch(number)
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - start, time.process_time() - used

    block(0)
    ratios, used, steps = [], [], []
    for pair in range(PAIRS):
        seconds = {}
        for on in (True, False) if pair % 2 else (False, True):  # neither always comes first
            observed.on = on
            seconds[on] = block(pair)
        ratios.append(seconds[True][0] / seconds[False][0])
        used.append(seconds[True][1] / seconds[False][1])
        steps.append(seconds[False][0] / BLOCK)
    observed.on = True
    if dist.get_rank() == 0:
        low, middle, high = statistics.quantiles(ratios, n=4)
        step = statistics.median(steps) * 1e3
        cpu = statistics.median(used)  # what a busy machine disturbs less
        print(f"width {width:5}: step {step:6.2f} ms, observed {middle:.3f}x ({low:.3f} to {high:.3f}), processor time {cpu:.3f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main()
