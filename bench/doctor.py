"""Measure the doctor's overhead. Alternate observed and unobserved steps in the same ranks.

    python bench/doctor.py [WIDTH …]          two CPU ranks with DDP
    python bench/doctor.py cuda [WIDTH …]     two ranks that share a GPU, with gloo

For each model width, the script prints how much longer an observed step takes. It ignores the first
steps, which the doctor watches in full. Machine noise changes step times far more than observing
does, but rarely from one step to the next. So the script compares each step with its neighbor. The
median difference is the cost of a light step. To this, the script adds the mean cost of the rare
fully watched steps, as measured by the doctor itself. The interval contains the median with 95%
confidence. The output also shows the doctor's own timing per step, and the share of a core that the
watching process uses.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WIDTHS = (256, 512, 1024, 2048)
SECONDS = 120  # measure each width for this long
BATCH = 64


def main(device: str, widths: tuple[int, ...]) -> None:
    from paralab.doctor.observation import Reader
    from paralab.doctor.watch import Watch

    for width in widths:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        with tempfile.TemporaryDirectory() as folder:
            common = {
                **os.environ,
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "rank", device, str(width), folder]
            ranks = [
                subprocess.Popen(
                    command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                )
                for rank in range(2)
            ]
            start, used = time.perf_counter(), time.process_time()
            Watch(ranks[0], Reader(Path(folder)), 60.0, lambda finding: None, False).until_the_end()  # type: ignore[arg-type]
            share = (time.process_time() - used) / (time.perf_counter() - start)
            codes = [rank.wait() for rank in ranks]
            assert codes == [0, 0], codes
            print(f"             the watching process: {share:.1%} of a core", flush=True)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the median's confidence interval. Its limits are the sorted values about sqrt(n)
    places below and above the middle."""
    ordered, middle, aside = sorted(values), len(values) / 2, 0.98 * len(values) ** 0.5
    return ordered[max(0, int(middle - aside))], ordered[min(len(values) - 1, int(middle + aside))]


def rank(device: str, width: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from paralab.observe.begin import begin
    from paralab.observe.digests import EVERY

    observed = begin(folder)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    samples = BATCH * 2 * 512
    data = TensorDataset(torch.randn(samples, 64), torch.randint(0, 10, (samples,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    layers = [
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    ]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def batches() -> Iterator[list[torch.Tensor]]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            was, observed.on = observed.on, True  # otherwise the doctor would miss this epoch
            iterator = iter(loader)
            observed.on = was
            yield from iterator

    stream = batches()

    def step() -> float:
        began = time.perf_counter()
        inputs, targets = next(stream)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()  # otherwise the device's work would hide the host's work
        return time.perf_counter() - began

    for _ in range(128):
        step()
    begun = torch.tensor(
        statistics.mean(step() for _ in range(64))
    )  # rank 0's clock determines the number of steps
    dist.broadcast(begun, 0)
    more, plain, budget = [], [], observed.budget
    spent, paused = budget.all_spent, time.perf_counter_ns()
    for number in range(int(SECONDS / 2 / float(begun))):
        seconds = {}
        for on in (True, False) if number % 2 else (False, True):  # alternate the order
            observed.on = on
            if on and budget._began is not None:
                budget._began += (
                    time.perf_counter_ns() - paused
                )  # its clock stops while observing is off
            seconds[on] = step()
            if on:
                paused = time.perf_counter_ns()
        more.append(seconds[True] - seconds[False])
        plain.append(seconds[False])
    observed.on = True
    if dist.get_rank() == 0:
        usual, (low, high) = statistics.median(plain), interval(more)
        rare = (budget._plain / budget.every + budget._digests / max(budget.every, EVERY)) / 1e9
        times, least, most = (
            1 + (seconds + rare) / usual for seconds in (statistics.median(more), low, high)
        )
        own = (budget.all_spent - spent) / len(more) / 1e3
        print(
            f"width {width:5}: step {usual * 1e3:6.2f} ms, observed {times:.3f}x ({least:.3f} to {most:.3f}, {len(more)} pairs), "
            f"including {rare / usual:.3f} for watched steps, one in {budget.every}; own clock {own:.0f} us per step",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        devices, widths = sys.argv[1:2], sys.argv[2:]
        if devices != ["cuda"]:
            devices, widths = ["cpu"], sys.argv[1:]
        main(devices[0], tuple(map(int, widths)) or WIDTHS)
