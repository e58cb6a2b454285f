"""What it costs a training to be observed by the doctor: blocks of steps with and without, in turns, in the same ranks.

    python bench/doctor.py [WIDTH …]     two CPU ranks, DDP; one line per width of the model: median of the ratios of blocks

The first 64 steps, of which everything is watched, are not in the blocks; those that follow are, with all that is sampled in them.
There are so many blocks as fit into two minutes, because single ones differ by 10 % here. The interval is the one that holds the
median of the pairs' ratios with 95 % certainty. Beside it: the processor time of rank 0 that observing takes in a step, the same by
its own clock, and the share of a core that the watching process takes.
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

WIDTHS = (256, 512, 1024, 2048)
BLOCK = 64  # steps: at most one of them is sampled with digests
SECONDS = 120  # of measuring, for each width
BATCH = 64


def main(widths: tuple[int, ...]) -> None:
    from paralab.doctor.observation import Reader
    from paralab.doctor.observing import Watch

    for width in widths:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        with tempfile.TemporaryDirectory() as folder:
            common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "rank", str(width), folder]
            ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
            start, used = time.perf_counter(), time.process_time()
            Watch(ranks[0], Reader(Path(folder)), 60.0, lambda finding: None, False).until_the_end()  # type: ignore[arg-type]
            share = (time.process_time() - used) / (time.perf_counter() - start)
            codes = [rank.wait() for rank in ranks]
            assert codes == [0, 0], codes
            print(f"             the watching process: {share:.1%} of a core", flush=True)


def interval(values: list[float]) -> tuple[float, float]:
    """Of the median, by the places of the values in order: of n, about sqrt(n) to both sides of the middle."""
    ordered, middle, aside = sorted(values), len(values) / 2, 0.98 * len(values) ** 0.5
    return ordered[max(0, int(middle - aside))], ordered[min(len(values) - 1, int(middle + aside))]


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
        """One pass over the loader, BLOCK steps: their seconds, and their processor time."""
        sampler.set_epoch(number)
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - began, time.process_time() - used

    block(0)
    begun = torch.tensor(block(0)[0])  # rank 0's clock decides how many there are
    dist.broadcast(begun, 0)
    pairs = min(max(12, int(SECONDS / 2 / float(begun))), 200)
    ratios, used, own, plain = [], [], [], []
    for pair in range(pairs):
        seconds = {}
        for on in (True, False) if pair % 2 else (False, True):  # neither always comes first
            observed.on = on
            observed.budget._began, spent = time.perf_counter_ns(), observed.budget.all_spent  # it measures nothing while off
            seconds[on] = block(pair)
            plain += [] if on else [seconds[on][0] / BLOCK * 1e3]
            own += [(observed.budget.all_spent - spent) / BLOCK / 1e3] if on else []
        ratios.append(seconds[True][0] / seconds[False][0])
        used.append((seconds[True][1] - seconds[False][1]) / BLOCK * 1e6)
    observed.on = True
    if dist.get_rank() == 0:
        low, high = interval(ratios)
        cpu, clock = statistics.median(used), statistics.median(own)
        print(
            f"width {width:5}: step {statistics.median(plain):6.2f} ms, observed {statistics.median(ratios):.3f}x "
            f"({low:.3f} to {high:.3f}, {pairs} pairs), processor time {cpu:+.0f} us a step, own clock {clock:.0f} us, "
            f"one step in {observed.budget.every} watched",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]), sys.argv[3])
    else:
        main(tuple(map(int, sys.argv[1:])) or WIDTHS)
