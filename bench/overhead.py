"""Compare paralab with a hand-written loop: step time, startup time, and run folder size.

    make bench

Both train the same model with the same batch size. They alternate, so noise affects both. The ratio
is the median over all rounds. Parentheses show the smallest and largest ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
WARM_UP = 3


def handwritten(
    ranks: int, workload: str, batch: int, steps: int, precision: str
) -> tuple[float, float]:
    """Run the hand-written loop. Return the median step time and the wall time, in seconds."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks > 1
        else []
    )
    command = [
        sys.executable,
        *launcher,
        str(HERE / "handwritten.py"),
        workload,
        str(batch),
        str(steps),
        precision,
    ]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    wall = time.perf_counter() - start
    return statistics.median(json.loads(done.stdout.strip().splitlines()[-1])[WARM_UP:]), wall


def paralab(
    ranks: int, workload: str, batch: int, steps: int, precision: str
) -> tuple[float, float, Path]:
    """Run paralab. Return the median step time and the wall time in seconds, and the run folder."""
    # The hand-written loop uses gloo. bench/collectives.py compares the backends.
    several = ["ddp", "--replicas", str(ranks), "--backend", "gloo"]
    strategy = several if ranks > 1 else ["single"]
    options = [
        "--workload",
        workload,
        "--batch-size",
        str(batch),
        "--steps",
        str(steps),
        "--precision",
        precision,
    ]
    out = Path(tempfile.mkdtemp()) / "run"
    command = [
        sys.executable,
        "-m",
        "paralab",
        "run",
        *strategy,
        *options,
        "--out",
        str(out),
        "--json",
    ]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["step_seconds"]["median"], time.perf_counter() - start, out


def environment() -> dict[str, str]:
    """Return an environment with one thread per rank, so both loops use the same cores."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def compare(
    title: str,
    ranks: int,
    workload: str,
    batch: int,
    steps: int,
    precision: str = "fp32",
    rounds: int = 5,
) -> None:
    ours, theirs, walls = [], [], []
    for number in range(rounds):
        pair = {}
        for side in ("paralab", "hand") if number % 2 else ("hand", "paralab"):
            run = paralab if side == "paralab" else handwritten
            pair[side] = run(ranks, workload, batch, steps, precision)
        ours.append(pair["paralab"][0])
        theirs.append(pair["hand"][0])
        walls.append(pair["paralab"][1] - pair["hand"][1])
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(
        f"{title:<42} hand-written {statistics.median(theirs) * 1e3:7.2f} ms   paralab {statistics.median(ours) * 1e3:7.2f} ms   "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})   "
        f"entire command {statistics.median(walls):+.2f} s",
        flush=True,
    )


def long_run() -> None:
    """Train for ten thousand steps and print the run folder size, memory growth, and time."""
    _, wall, folder = paralab(2, "mlp:tiny", 32, 10_000, "fp32")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    events = map(json.loads, (folder / "events" / "rank0.jsonl").read_text().splitlines())
    memory = [event["process_bytes"] for event in events if event["event"] == "memory"]
    grown = (memory[-1] - memory[0]) / 2**20
    print(
        f"ddp, 2 ranks, 10,000 steps of mlp:tiny: run folder {size / 2**20:.1f} MiB, process grew by {grown:.0f} MiB, {wall:.1f} s"
    )


def main() -> None:
    if "gpu" in sys.argv:
        compare("single, gpt:124m, batch 16, bf16", 1, "gpt:124m", 16, 30, "bf16", rounds=2)
        return
    compare("single, mlp, batch 256, 20 steps", 1, "mlp", 256, 20)
    compare("ddp on 2 ranks, mlp, batch 256, 20 steps", 2, "mlp", 256, 20)
    compare("ddp on 2 ranks, mlp, batch 64, 80 steps", 2, "mlp", 64, 80)
    long_run()


if __name__ == "__main__":
    main()
