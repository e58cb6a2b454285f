"""Run every CUDA path on one GPU and print short tables.

    make gpu

The script runs comparisons, a practical, verifications, the overhead benchmark, and the tests
marked `gpu`. The comparisons cover real nn.DataParallel with repeated device ids, two ranks on one
GPU with gloo, tf32, bf16, fp16 with a GradScaler, stages, and NVML load. If the environment
variable KEEP names a folder, the script copies pages and results to that folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPARISONS = [
    ["compare"],
    ["compare", "--workload", "mlp:large", "--no-proof", "--rounds", "2", "--steps", "10"],
    ["compare", "single", "single --precision tf32", "single --precision bf16", "single --precision fp16", "--workload", "gpt:124m",
     "--no-proof", "--rounds", "3"],
]  # fmt: skip
PRACTICALS = ["7"]
TESTS = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-m",
    "gpu",
    "-p",
    "no:cacheprovider",
    "--tb=short",
    "tests",
]
PROOFS = [["ddp", "--precision", "fp32"], ["all", "--workload", "gpt:tiny"]]


def paralab(*arguments: str, folder: str) -> dict:
    command = [sys.executable, "-m", "paralab", *arguments, "--device", "cuda", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    print(f"\n$ paralab {' '.join(arguments)}   ({time.perf_counter() - start:.0f} s)", flush=True)
    if done.returncode:
        print(f"FAILED\n{done.stderr}", flush=True)
        return {}
    return json.loads(done.stdout)


def show_comparison(result: dict) -> None:
    for row in result["failed"]:
        print(f"{row['name']:<34} {row['error']}")
    for row in result["rows"]:
        metrics, ratio = row["metrics"], row["speed_up"]
        spread = (
            "too few rounds" if ratio["low"] is None else f"{ratio['low']:.2f}-{ratio['high']:.2f}"
        )
        gpu = metrics["load"]["gpu"]
        load = (
            f"load {gpu[0]['utilization']:.0%}"
            if gpu
            else f"load: {metrics['load']['not_measured']}"
        )
        peak = metrics["flops"]["share_of_peak"]
        print(
            f"{row['name']:<34} {row['step_seconds']['median'] * 1e3:8.2f} ms  {ratio['value']:5.2f} "
            f"({spread})  comm {metrics['communication_share']:4.0%}  "
            f"peak {max(m['bytes'] for m in row['peak_bytes']) / 2**20:6.0f} MiB  {load}  "
            f"{'' if peak is None else f'{peak:.0%} of peak  '}"
            f"{'' if row['verify'] is None else 'equal' if row['verify']['equal'] else row['verify']['cause']}",
            flush=True,
        )


def keep(folder: Path, name: str) -> None:
    if os.environ.get("KEEP"):
        for file in ("report.html", "result.json", "sheet.md"):
            if (folder / file).exists():
                shutil.copy(folder / file, Path(os.environ["KEEP"], f"{name}_{file}"))


def main() -> None:
    failed = 0
    short = "--short" in sys.argv
    with tempfile.TemporaryDirectory() as folder:
        for number, arguments in enumerate(COMPARISONS):
            result = paralab(*arguments, folder=folder)
            failed += not result
            if result:
                show_comparison(result)
                keep(Path(folder, result["run_folder"]), f"compare{number}")
        for number in PRACTICALS:
            out = Path(folder, f"practical{number}")
            result = paralab("practical", number, "--out", str(out), folder=folder)
            failed += not result
            if result:
                print((out / "sheet.md").read_text(), flush=True)
                keep(out, f"practical{number}")
        # Verifications and tests do not measure time, so they can share the GPU.
        tests = (
            None
            if short
            else subprocess.Popen(
                TESTS, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        for options in PROOFS:
            proof = paralab("verify", *options, folder=folder)
            failed += not proof
            if proof:
                ran = proof["configurations"]
                equal = sum(each["equal"] for each in ran)
                excused = sum(bool(each["excused"]) for each in ran)
                largest = max(each["max_difference"] or 0.0 for each in ran)
                known = f"{excused} differ for a known reason"
                print(f"{equal} of {len(ran)} equal, {known}, largest {largest:.1e}", flush=True)
    if tests:
        print(f"\n$ pytest -m gpu\n{tests.communicate()[0]}", flush=True)
        failed += tests.returncode != 0
        failed += (
            subprocess.run(
                [sys.executable, str(ROOT / "bench/overhead.py"), "gpu"], cwd=ROOT
            ).returncode
            != 0
        )
        sharing = [sys.executable, str(ROOT / "bench/gpu_sharing.py")]
        failed += subprocess.run(sharing, cwd=ROOT).returncode != 0
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
