"""The device grid: which rank uses which devices. Pure functions on plain numbers.

hybrid, 2 replicas × 2 stages (rank r: device r, then device r + 2)

              stage 0    stage 1
    rank 0    cuda:0  →  cuda:2
    rank 1    cuda:1  →  cuda:3

with --schedule, a process per stage (rank r: device r; rank = replica × stages + stage)

                 stage 0             stage 1
    replica 0    rank 0, cuda:0  →   rank 1, cuda:1
    replica 1    rank 2, cuda:2  →   rank 3, cuda:3
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

PROCESS_PER_REPLICA = ("ddp", "fsdp", "hybrid")


@dataclass(frozen=True)
class Device:
    """A device as the plan sees it.

    name     `cuda:1`, or `cpu:1` for a share of the cores
    torch    what tensors are moved to: `cuda:1`, `cpu`
    role     what it holds: `replica 0`, `stage 1`
    virtual  one of several devices made of one CPU
    shared   a GPU that does the work of several devices of the plan
    """

    name: str
    torch: str
    role: str
    virtual: bool
    shared: bool


def grid(
    strategy: str, replicas: int, stages: int, placement: str, gpus: int, process_per_stage: bool = False
) -> list[list[Device]]:
    """The devices of every rank. gpus = 0 means CPU devices."""
    if process_per_stage:
        cells = [[(rank, _role(strategy, rank % stages))] for rank in range(replicas * stages)]
    elif strategy in PROCESS_PER_REPLICA:
        cells = [[(rank + stage * replicas, _role(strategy, stage)) for stage in range(stages)] for rank in range(replicas)]
    elif strategy == "dp":
        cells = [[(replica, f"replica {replica}") for replica in range(replicas)]]
    else:
        cells = [[(stage, _role(strategy, stage)) for stage in range(stages)]]
    if placement == "same":  # model parallelism broken on purpose: every stage on its rank's first device
        cells = [[(row[0][0], role) for _, role in row] for row in cells]
    used = Counter(index % gpus if gpus else index for row in cells for index, _ in row)
    virtual = not gpus and len(used) > 1
    return [
        [
            Device(
                name=f"cuda:{index % gpus}" if gpus else f"cpu:{index}",
                torch=f"cuda:{index % gpus}" if gpus else "cpu",
                role=role,
                virtual=virtual,
                shared=used[index % gpus if gpus else index] > 1,
            )
            for index, role in row
        ]
        for row in cells
    ]


def _role(strategy: str, stage: int) -> str:
    return {"single": "whole model", "ddp": "replica", "fsdp": "shard"}.get(strategy, f"stage {stage}")
