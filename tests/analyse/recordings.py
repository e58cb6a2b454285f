"""Hand-written run folders, so that a test can show the picture and know the answer."""

import json

from paralab.record.folder import SCHEMA_VERSION

MACHINE = {
    "cores": 2,
    "memory_bytes": 2**34,
    "cpu": "a CPU",
    "system": "Linux",
    "python": "3.11",
    "torch": "2.12",
    "cuda": None,
    "gpus": [],
    "backends": ["gloo"],
    "no_gpu_reason": "there is none",
}
WORKLOAD = {
    "name": "mlp",
    "parameters": 100,
    "parameter_bytes": 400,
    "samples": None,
    "batch_size": 64,
    "data_path": "none",
    "weighted": False,
    "optimizer": "SGD",
    "batch_norms": 0,
    "dropout": False,
    "random": False,
    "flops_per_sample": 1e6,
}
STEP = 10.0  # every step lasts ten seconds, so shares are easy to read


def plan(strategy="ddp", ranks=2, stages=1, micro_batches=1, accumulate=1, batch_size=64, **more):
    devices = [[f"cpu:{rank + stage * ranks}" for stage in range(stages)] for rank in range(ranks)]
    return {
        "strategy": strategy,
        "replicas": ranks,
        "stages": stages,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "micro_batches": micro_batches,
        "precision": "fp32",
        "device": "cpu",
        "num_steps": 12,
        "workload": "mlp",
        "seed": 0,
        "loss_scale": None,
        "bucket_mb": None,
        "find_unused": False,
        "steps": 12,
        "epochs": None,
        "samples": None,
        "placement": "spread",
        "backend": "gloo" if ranks > 1 else None,
        "stage_parts": [],
        "environment": {},
        "reasons": [],
        "threads_per_device": 1,
        "arithmetic": "64 = 64 samples",
        "remarks": [],
        "differences": [],
        "ranks": [
            {
                "rank": rank,
                "local_rank": rank,
                "devices": [
                    {"name": n, "torch": "cpu", "role": "replica", "virtual": True, "shared": False}
                    for n in names
                ],
                "samples_per_step": batch_size // ranks,
                "split": [batch_size // ranks] * len(names),
                "replica": rank,
            }
            for rank, names in enumerate(devices)
        ],
        **more,
    }


def write(folder, plan, step_of, steps=12, machine=None, workload=None, extra=None):
    """`step_of(rank)` returns the spans of one step as (event, start, end, fields), from 0 to
    STEP. All steps are the same."""
    (folder / "events").mkdir(parents=True)
    manifest = {
        "schema": SCHEMA_VERSION,
        "created": "2026-01-01T00:00:00+0000",
        "command": ["paralab", "run"],
        "folder": "/here",
        "packages": {},
        "plan": plan,
        "machine": MACHINE | (machine or {}),
        "workload": WORKLOAD | (workload or {}),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for rank in range(len(plan["ranks"])):
        lines = [
            {
                "event": "start",
                "time": 0.0,
                "rank": rank,
                "pid": 100 + rank,
                "devices": [],
                "unix_seconds": 0.0,
            }
        ]
        for step in range(steps):
            base = step * (STEP + 1)  # leave a second between two steps
            lines.append({"event": "data", "step": step, "start": base - 0.5, "end": base})
            spans = step_of(rank)
            reduced = [fields for event, _, _, fields in spans if event == "all_reduce"]
            for event, start, end, fields in spans:
                lines.append(
                    {
                        "event": event,
                        "step": step,
                        "start": base + start,
                        "end": base + end,
                        **fields,
                    }
                )
            lines.append(
                {
                    "event": "step",
                    "step": step,
                    "start": base,
                    "end": base + STEP,
                    "epoch": 0,
                    "samples": plan["ranks"][rank]["samples_per_step"],
                    "loss": 1.0 / (step + 1) / len(plan["ranks"]),
                    "skipped": False,
                    "all_reduces": len(reduced),
                    "bytes": sum(fields["bytes"] for fields in reduced),
                }
            )
        lines += extra(rank) if extra else []
        lines.append({"event": "end", "time": steps * (STEP + 1), "status": "completed"})
        (folder / "events" / f"rank{rank}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    return folder
