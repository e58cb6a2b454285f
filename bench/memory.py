"""Compare `paralab plan`'s memory estimate with the measured peak, on this machine.

python bench/memory.py                    mlp, gpt, and cnn with each strategy, on CPU ranks
python bench/memory.py --device cuda      on one GPU
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import paralab
from paralab.errors import ParalabError
from paralab.units import size

CPU = [
    f"{strategy} {workload}"
    for workload in ("mlp", "gpt", "cnn")
    for strategy in ("single", "dp", "ddp", "fsdp", "mp", "pipeline", "hybrid")
]
CPU += [
    f"fsdp {workload} {options}"
    for workload in ("mlp", "gpt", "cnn")
    for options in ("zero=1 replicas=3", "zero=2", "replicas=4 shard_groups=2")
]
CPU += [
    "tp mlp",
    "tp gpt",
    "tp examples/huggingface.py:workload",
    "single gpt recompute=full",
    "single gpt recompute=selective",
    "dp gpt recompute=full",
    "fsdp gpt recompute=selective",
    "tp gpt recompute=full",
    "pipeline gpt schedule=1f1b recompute=full",
    "single gpt accumulate=4",
    "single gpt precision=bf16",
    "fsdp gpt precision=bf16",
    "pipeline gpt schedule=1f1b",
    "ddp mlp replicas=3 accumulate=2",
    "cp gpt",
    "cp gpt recompute=full accumulate=2",
    "cp gpt shards=4 precision=bf16",
    "local-sgd mlp",
    "local-sgd gpt outer_lr=0.7",
    "local-sgd gpt outer_lr=0.7 outer_momentum=0.9",
    "ddp gpt compress=bf16",
    "ddp mlp compress=powersgd steps=5",
    "ddp gpt compress=powersgd powersgd_rank=2 steps=5",
    "ddp cnn compress=powersgd steps=5",
]
CPU += [
    f"hybrid gpt:tiny {options}"
    for options in (
        "shards=2",
        "shards=2 stages=1",
        "shards=2 stages=1 zero=3",
        "shards=2 zero=3",
        "zero=1",
        "zero=2",
        "zero=3",
        "zero=3 recompute=full",
        "zero=3 precision=bf16",
    )
]
GPU = [
    "single mlp batch_size=4096",
    "single cnn batch_size=4096",
    "single gpt:124m",
    "single gpt:124m precision=bf16",
    "single gpt:124m precision=bf16 batch_size=64",
    "single gpt:124m precision=bf16 accumulate=4",
    "ddp gpt:124m precision=bf16 replicas=1",
    "ddp gpt:124m precision=bf16 replicas=1 bucket_view=on",
    "fsdp gpt:124m precision=bf16 replicas=1",
    "single gpt:124m precision=bf16 batch_size=64 recompute=full",
    "single gpt:124m precision=bf16 batch_size=64 recompute=selective",
    "mp gpt:124m precision=bf16",
    "pipeline gpt:124m precision=bf16",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    print("| configuration | device | estimated | measured | error |\n|---|---|---|---|---|")
    for words in CPU if device == "cpu" else GPU:
        try:
            print(*_rows(words, device), sep="\n", flush=True)
        except ParalabError as error:
            print(f"| {words} | failed: {error.problem} |", flush=True)


def _rows(words: str, device: str) -> list[str]:
    strategy, workload, *pairs = words.split()
    options = {"steps": 2}
    options |= {name: _value(value) for name, value in (pair.split("=") for pair in pairs)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        result = paralab.run(workload, strategy, device=device, out=out, **options)
    rows = []
    for memory in result.peak_bytes:
        error = memory.estimate_error
        shown = "not estimated" if error is None else f"{error:+.3%}"
        sizes = size(memory.estimated_bytes), size(memory.bytes)
        rows.append(f"| {words} | {memory.device} | {' | '.join(sizes)} | {shown} |")
    return rows


def _value(text: str) -> bool | float | str:
    if text.isdigit():
        return int(text)
    return text == "on" or (float(text) if text[0].isdigit() else text)


if __name__ == "__main__":
    main()
