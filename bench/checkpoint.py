"""Measure the cost of saving. Alternate the same run with and without a checkpoint every 50 steps.

    python bench/checkpoint.py [WORKLOAD [PRECISION [STEPS]]]

The ratio compares the time from step 10 to the last step. This time includes every wait for a save,
but not the startup.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WARM_UP = 10
EVERY = 50
ROUNDS = 3


def train(folder: Path, options: list[str], saving: bool) -> tuple[float, dict]:
    out, kept = folder / "run", folder / "checkpoints"
    command = [
        sys.executable,
        "-m",
        "paralab",
        "run",
        "single",
        *options,
        "--out",
        str(out),
        "--json",
    ]
    if saving:
        command += [
            "--checkpoint",
            str(kept),
            "--checkpoint-every",
            str(EVERY),
            "--keep-checkpoints",
            "1",
        ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    events = [
        json.loads(line) for line in (out / "events" / "rank0.jsonl").read_text().splitlines()
    ]
    steps = [event for event in events if event["event"] == "step"]
    shutil.rmtree(folder)
    return steps[-1]["end"] - steps[WARM_UP]["start"], json.loads(done.stdout)


def main() -> None:
    workload, precision, steps = (sys.argv[1:] + ["mlp", "fp32", "310"][len(sys.argv) - 1 :])[:3]
    options = ["--workload", workload, "--precision", precision, "--steps", steps]
    ratios, saves, plain = [], [], []
    for number in range(ROUNDS):
        seconds = {}
        for saving in (True, False) if number % 2 else (False, True):
            seconds[saving], result = train(Path(tempfile.mkdtemp()), options, saving)
            if saving:
                saves.append(result["saves"])
        plain.append(seconds[False])
        ratios.append(seconds[True] / seconds[False])
    blocked = statistics.median(save["blocked_seconds"] for save in saves)
    whole = statistics.median(save["seconds"] for save in saves)
    print(
        f"single, {workload}, {precision}, {steps} steps, a save every {EVERY}: {statistics.median(ratios):.4f} of the time "
        f"without saves ({min(ratios):.4f}-{max(ratios):.4f}), which is {statistics.median(plain):.1f} s; "
        f"a save takes {whole:.2f} s and blocks the host for {blocked * 1e3:.1f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
