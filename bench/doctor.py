"""What it costs a training to be observed by the doctor: blocks of steps with and without, in turns, in the same ranks.

    python bench/doctor.py [WIDTH …]     two CPU ranks, DDP; one line per width of the model: median of the blocks' ratios

The first 64 steps, of which everything is watched, are not in the blocks; those that follow are, up to step 1,024, with all that is
sampled in them. Beside the ratio of the blocks' times: that of the median steps, which are light ones, and are not disturbed by
other work on the machine that comes in bursts; the processor time of rank 0 that observing takes in a step, which other
work on the machine disturbs less, the same by its own clock, and the share of a core that the watching process takes.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WIDTHS = (256, 512, 1024, 2048, 3072)
BLOCK = 64  # steps: at most one of them is sampled with digests
PAIRS = 12
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

    def block(number: int) -> tuple[list[float], float]:
        """One pass over the loader: the seconds of each of BLOCK steps, and the processor time of all."""
        sampler.set_epoch(number)
        dist.barrier()
        ends, used = [time.perf_counter()], time.process_time()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ends.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(ends)], time.process_time() - used

    block(0)
    ratios, used, own = [], [], []
    steps: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(PAIRS):
        seconds = {}
        for on in (True, False) if pair % 2 else (False, True):  # neither always comes first
            observed.on = on
            observed.budget._began, spent = time.perf_counter_ns(), observed.budget.all_spent  # it measures nothing while off
            seconds[on] = block(pair)
            steps[on] += seconds[on][0]
            own += [(observed.budget.all_spent - spent) / BLOCK / 1e3] if on else []
        ratios.append(sum(seconds[True][0]) / sum(seconds[False][0]))
        used.append((seconds[True][1] - seconds[False][1]) / BLOCK * 1e6)
    observed.on = True
    if dist.get_rank() == 0:
        low, middle, high = statistics.quantiles(ratios, n=4)
        light, without = (statistics.median(steps[on]) * 1e3 for on in (True, False))
        cpu, clock = statistics.median(used), statistics.median(own)
        print(
            f"width {width:5}: step {without:6.2f} ms, observed {middle:.3f}x ({low:.3f} to {high:.3f}), "
            f"median step {light / without:.3f}x, "
            f"processor time +{cpu:.0f} us a step, "
            f"own clock {clock:.0f} us, one step in {observed.budget.every} watched",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]), sys.argv[3])
    else:
        main(tuple(map(int, sys.argv[1:])) or WIDTHS)
