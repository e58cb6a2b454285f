"""Run folders written by hand, so that a test can show the picture and know the answer."""

import json

STEP = 10.0  # every step below lasts ten seconds, so that shares can be read off


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
            }
            for rank, names in enumerate(devices)
        ],
        **more,
    }


def write(folder, plan, step_of, steps=12, machine=None, workload=None, extra=None):
    """`step_of(rank)`: the spans of one step as (event, start, end, fields), from 0 to STEP; every
    step is the same."""
    (folder / "events").mkdir(parents=True)
    machine = {
        "cores": 2,
        "cpu": "a CPU",
        "gpus": [],
        "memory_bytes": 2**34,
        "python": "3.11",
        "cuda": None,
    } | (machine or {})
    workload = {"name": "mlp", "flops_per_sample": 1e6, "parameters": 100, "data_path": "none"} | (
        workload or {}
    )
    manifest = {
        "schema": 1,
        "plan": plan,
        "machine": machine,
        "workload": workload,
        "packages": {},
        "command": ["paralab", "run"],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for rank in range(len(plan["ranks"])):
        lines = [
            {"event": "start", "time": 0.0, "rank": rank, "pid": 100 + rank, "unix_seconds": 0.0}
        ]
        for step in range(steps):
            base = step * (STEP + 1)  # a second between two steps
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
