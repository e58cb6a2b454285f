"""Run `paralab tune` over a slow link. Does it match or beat DDP's default on three models?

    python bench/slow_link.py      (needs root and iproute2)

Two nodes (network namespaces) share a rate-limited link. The script prints one line per model, then
the model's bucket-size curve.
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

# The model, and the rate in Mbit/s at which communication takes about as long as computation.
MODELS = (("mlp", 1000), ("gpt", 100), ("cnn", 20))


def main() -> None:
    reason = why_not()
    if reason:
        print(f"slow_link: skipped, because it {reason}")
        return
    for model, rate in MODELS:
        with link(rate) as (options, environment), tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "paralab",
                "tune",
                "ddp",
                "--workload",
                model,
                *options,
                "--backend",
                "gloo",
                "--steps",
                "6",
                "--json",
            ]
            environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                print(f"{model}: FAILED\n{done.stderr}")
                continue
            result = json.loads(done.stdout)
        default, chosen = result["default"], result["chosen"]
        ratio, best = (
            chosen["speed_up"],
            "   (the default is best)" if result["best_is_default"] else "",
        )
        steps = [row["step_seconds"]["median"] * 1e3 for row in (default, chosen)]
        interval = f"{ratio['value']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
        print(
            f"{model:<4} at {rate} Mbit/s: default {steps[0]:.1f} ms, chosen {steps[1]:.1f} ms, {interval} {chosen['name']}{best}",
            flush=True,
        )
        for point in result["curve"]:
            bucket = "default" if point["bucket_mb"] is None else f"{point['bucket_mb']:g} MB"
            print(
                f"    {bucket:>9}  step {point['step_seconds'] * 1e3:7.1f} ms  exposed {point['exposed_seconds'] * 1e3:7.1f} ms"
            )


if __name__ == "__main__":
    main()
