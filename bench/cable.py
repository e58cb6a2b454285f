"""Compare measured communication with a known link rate. For each rate, print the measured time ÷
(bytes ÷ rate).

python bench/cable.py      (needs root and iproute2)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.link import link, why_not  # noqa: E402

RATES = (100, 400, 1000)  # Mbit/s


def main() -> None:
    reason = why_not()
    if reason:
        print(f"cable: skipped, because it {reason}")
        return
    for rate in RATES:
        with link(rate) as (options, environment), tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "paralab",
                "run",
                "ddp",
                *options,
                "--backend",
                "gloo",
                "--steps",
                "8",
                "--json",
            ]
            environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=True
            )
        result = json.loads(done.stdout)
        needed = result["bytes_per_step"] * 8 / (rate * 1e6)
        measured = result["metrics"]["communication_seconds"]
        print(
            f"{rate:5} Mbit/s: measured {measured:.4f} s, bytes / rate {needed:.4f} s, ratio {measured / needed:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
