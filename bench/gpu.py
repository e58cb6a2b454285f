"""Every CUDA path on one GPU (or more), in one call and as a short table: `make gpu`.

Runs each strategy, the proof that they are the same training, fp16 with a scale that overflows and recovers, the step of
gpt:124m beside a hand-written loop, and the tests marked `gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = [
    ["single"],
    ["single", "--precision", "tf32"],
    ["single", "--precision", "bf16"],
    ["dp", "--replicas", "2"],
    ["dp", "--replicas", "3"],
    ["ddp", "--replicas", "2"],
    ["ddp", "--replicas", "2", "--accumulate", "4", "--precision", "bf16"],
    ["mp", "--stages", "2"],
    ["pipeline", "--stages", "2", "--micro-batches", "4"],
    ["hybrid", "--replicas", "2", "--stages", "2", "--micro-batches", "4"],
    ["single", "--precision", "fp16", "--loss-scale", "1e9", "--workload", "gpt", "--steps", "40"],
    ["ddp", "--replicas", "2", "--precision", "fp16", "--workload", "gpt"],
]


def paralab(*arguments: str, folder: str) -> dict:
    command = [sys.executable, "-m", "paralab", *arguments, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        print(f"FAILED: paralab {' '.join(arguments)}\n{done.stderr}", flush=True)
        return {}
    return json.loads(done.stdout)


def main() -> None:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'paralab run …':<76} {'step':>9} {'peak':>9}  loss")
        for options in RUNS:
            given = options if "--workload" in options else [*options, "--workload", "mlp:large"]
            result = paralab("run", *given, "--device", "cuda", folder=folder)
            failed += not result
            if result:
                losses = [loss for loss in result["losses"] if loss is not None]
                peak = max(memory["bytes"] for memory in result["peak_bytes"]) / 2**20
                skipped = f", {result['skipped_steps']} of {result['steps']} steps skipped" if result["skipped_steps"] else ""
                step = result["step_seconds"]["median"] * 1e3
                print(
                    f"{' '.join(given):<76} {step:6.2f} ms {peak:5.0f} MiB  {losses[0]:.3f} → {losses[-1]:.3f}{skipped}", flush=True
                )
        for options in (["all"], ["ddp", "--precision", "fp32"]):
            proof = paralab("verify", *options, "--device", "cuda", folder=folder)
            failed += not proof
            if proof:
                equal = sum(case["equal"] for case in proof["cases"])
                legitimate = sum(case["legitimate"] for case in proof["cases"])
                largest = max(case["max_difference"] for case in proof["cases"])
                words = f"{equal} of {len(proof['cases'])} equal, {legitimate} differ for a known reason, largest {largest:.1e}"
                print(f"verify {' '.join(options)}: {words} ({proof['seconds']:.0f} s)", flush=True)
    sys.stdout.flush()
    failed += subprocess.run([sys.executable, str(ROOT / "bench/overhead.py"), "gpu"], cwd=ROOT).returncode != 0
    failed += (
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"], cwd=ROOT).returncode
        != 0
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
