"""The device grid: which rank uses which devices. Pure functions on plain numbers.

hybrid, 2 replicas × 2 stages (rank r: device r, then device r + 2)

              stage 0    stage 1
    rank 0    cuda:0  →  cuda:2
    rank 1    cuda:1  →  cuda:3

with --schedule, one process per stage (rank r: device r; rank = replica × stages + stage)

                 stage 0             stage 1
    replica 0    rank 0, cuda:0  →   rank 1, cuda:1
    replica 1    rank 2, cuda:2  →   rank 3, cuda:3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

PROCESS_PER_REPLICA = ("ddp", "fsdp", "hybrid")


@dataclass(frozen=True)
class Device:
    """A device in the plan.

    name     `cuda:1`, or `cpu:1` for a share of the cores
    torch    the torch device for its tensors: `cuda:1`, `cpu`
    role     `replica 0`, `stage 1`
    virtual  whether it is a share of a CPU
    shared   whether it is a GPU that does the work of several devices in the plan
    """

    name: str
    torch: str
    role: str
    virtual: bool
    shared: bool


@dataclass(frozen=True)
class Place:
    """Where torchrun or srun launched a rank.

    node   the node's host name
    gpus   unique IDs of the GPUs it sees, in order: two Slurm tasks may each see a different GPU as
           `cuda:0`
    cores  its share of the node's cores: 0.5 if two ranks share one core
    """

    node: str
    local_rank: int
    gpus: tuple[str, ...]
    cores: float


def grid(
    strategy: str,
    replicas: int,
    stages: int,
    placement: str,
    gpus: int,
    process_per_stage: bool = False,
) -> list[list[Device]]:
    """Assign devices to each rank; gpus = 0 means CPU devices."""
    if process_per_stage:
        cells = [[(rank, _role(strategy, rank % stages))] for rank in range(replicas * stages)]
    elif strategy in PROCESS_PER_REPLICA:
        cells = [
            [(rank + stage * replicas, _role(strategy, stage)) for stage in range(stages)]
            for rank in range(replicas)
        ]
    elif strategy == "dp":
        cells = [[(replica, f"replica {replica}") for replica in range(replicas)]]
    else:
        cells = [[(stage, _role(strategy, stage)) for stage in range(stages)]]
    if placement == "same":  # all stages on the rank's first device: no model parallelism
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


def placed(
    cells: list[list[Device]], places: Sequence[Place], placement: str, cuda: bool
) -> list[list[Device]]:
    """Lay out the same grid on launched ranks: each on its node, on the devices that it sees.

    ddp on 2 nodes × 2 GPUs:   rank 0  n1/cuda:0    rank 1  n1/cuda:1
                               rank 2  n2/cuda:0    rank 3  n2/cuda:1
    """
    if not cuda:
        where = {
            cell.name: place.node for row, place in zip(cells, places, strict=True) for cell in row
        }
        on_node = Counter(where.values())
        return [
            [replace(cell, virtual=on_node[where[cell.name]] > 1) for cell in row] for row in cells
        ]
    names: dict[str, str] = {}
    several = len({place.node for place in places}) > 1
    for place in places:
        for gpu in place.gpus:
            number = sum(
                name.rpartition("/")[0] == (place.node if several else "")
                for name in names.values()
            )
            names.setdefault(gpu, f"{place.node}/cuda:{number}" if several else f"cuda:{number}")
    rows = [
        [_index_of_device(place, places, 0 if placement == "same" else n) for n in range(len(row))]
        for row, place in zip(cells, places, strict=True)
    ]
    used = Counter(
        place.gpus[index] for row, place in zip(rows, places, strict=True) for index in row
    )
    return [
        [
            replace(
                cell,
                name=names[place.gpus[index]],
                torch=f"cuda:{index}",
                virtual=False,
                shared=used[place.gpus[index]] > 1,
            )
            for cell, index in zip(row, indices, strict=True)
        ]
        for row, indices, place in zip(cells, rows, places, strict=True)
    ]


def _index_of_device(place: Place, places: Sequence[Place], number: int) -> int:
    """Return the index of a rank's device `number` among the GPUs it sees.

    Ranks that see the same n GPUs take turns; a rank with GPUs of its own takes them in order.
    """
    together = [other for other in places if other.node == place.node and other.gpus == place.gpus]
    return (number * len(together) + together.index(place)) % len(place.gpus)


def _role(strategy: str, stage: int) -> str:
    return {"single": "whole model", "ddp": "replica", "fsdp": "shard"}.get(
        strategy, f"stage {stage}"
    )
