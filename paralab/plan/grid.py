"""The device grid: which rank uses which devices. These are pure functions on plain numbers.

For hybrid with 2 replicas × 2 stages, rank r uses device r and then device r + 2:

              stage 0    stage 1
    rank 0    cuda:0  →  cuda:2
    rank 1    cuda:1  →  cuda:3

With --schedule, each stage has its own process, and rank = replica × stages + stage:

                 stage 0             stage 1
    replica 0    rank 0, cuda:0  →   rank 1, cuda:1
    replica 1    rank 2, cuda:2  →   rank 3, cuda:3

With --shards, each shard of a stage has its own process, too: rank = (replica × stages + stage) ×
shards + shard. The shards of a stage have adjacent ranks, because they exchange the most data:

                            stage 0      stage 1
    replica 0    shard 0    rank 0   →   rank 2
                 shard 1    rank 1   →   rank 3
    replica 1    shard 0    rank 4   →   rank 6
                 shard 1    rank 5   →   rank 7

    along the shards     0 1    2 3    4 5    6 7
    along the stages     0 2    1 3    4 6    5 7
    along the replicas   0 4    1 5    2 6    3 7
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

PROCESS_PER_REPLICA = ("ddp", "fsdp", "ep", "hybrid", "local-sgd")
Axis = Literal["replicas", "stages", "shards"]
AXES: tuple[Axis, ...] = ("replicas", "stages", "shards")
Cell = tuple[int, int, int]  # a rank's replica, stage, and shard


@dataclass(frozen=True)
class Device:
    """A device in the plan.

    name     `cuda:1`, or `cpu:1` for a share of the cores
    torch    the torch device for its tensors: `cuda:1`, `cpu`
    role     `replica 0`, `stage 1`
    virtual  whether it is a share of a CPU
    shared   whether multiple devices in the plan use this GPU
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
    gpus   unique IDs of the GPUs that the rank sees, in order; two Slurm tasks may see different
           GPUs as `cuda:0`
    cores  the rank's share of the node's cores, such as 0.5 if two ranks share a core
    """

    node: str
    local_rank: int
    gpus: tuple[str, ...]
    cores: float


def ranks_along(axis: Axis, cells: Sequence[Cell]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ only along this axis of the grid."""
    number = AXES.index(axis)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, cell in enumerate(cells):
        groups.setdefault(cell[:number] + cell[number + 1 :], []).append(rank)
    return tuple(map(tuple, groups.values()))


def grid(
    strategy: str,
    replicas: int,
    stages: int,
    placement: str,
    gpus: int,
    process_per_cell: bool = False,
    places: Sequence[Place] = (),
    shards: int = 1,
) -> list[list[Device]]:
    """Return each rank's devices. If `gpus` is 0, use CPU devices.

    With `places`, a rank uses the devices that it sees on its node. For ddp on 2 nodes × 2 GPUs:

        rank 0  n1/cuda:0    rank 1  n1/cuda:1    rank 2  n2/cuda:0    rank 3  n2/cuda:1
    """
    names = _name_gpus(places)
    rows: list[list[tuple[str, str, str]]] = []  # each device's name, torch device, and role
    shape = strategy, replicas, stages, process_per_cell, shards
    for rank, numbered in enumerate(_indices(*shape)):
        rows.append([])
        for number, (index, role) in enumerate(numbered):
            if placement == "same":  # put all stages on the rank's first device
                number, index = 0, numbered[0][0]
            name, torch = f"cpu:{index}", "cpu"
            if gpus and places:
                local = _index_of_device(places[rank], places, number)
                name, torch = names[places[rank].gpus[local]], f"cuda:{local}"
            elif gpus:
                name = torch = f"cuda:{index % gpus}"
            rows[-1].append((name, torch, role))

    used = Counter(name for row in rows for name, _, _ in row)
    nodes = [place.node for place in places] or [""] * len(rows)
    cells = {(node, name) for node, row in zip(nodes, rows, strict=True) for name, _, _ in row}
    on_node = Counter(node for node, _ in cells)
    return [
        [
            Device(*cell, virtual=not gpus and on_node[node] > 1, shared=used[cell[0]] > 1)
            for cell in row
        ]
        for node, row in zip(nodes, rows, strict=True)
    ]


def _indices(
    strategy: str, replicas: int, stages: int, process_per_cell: bool, shards: int
) -> list[list[tuple[int, str]]]:
    """Return the numbers and roles of each rank's devices."""
    if process_per_cell:
        cells = product(range(replicas), range(stages), range(shards))
        roles_of_cells = (_role(stage, stages, shard, shards) for _, stage, shard in cells)
        return [[numbered] for numbered in enumerate(roles_of_cells)]
    if strategy == "dp":
        return [[(replica, f"replica {replica}") for replica in range(replicas)]]
    roles = {"single": "whole model", "ddp": "replica", "local-sgd": "replica", "fsdp": "shard"}
    roles["ep"] = "shard"
    role = roles.get(strategy, "stage {}")
    return [
        [(rank + stage * replicas, role.format(stage)) for stage in range(stages)]
        for rank in range(replicas)
    ]


def _role(stage: int, stages: int, shard: int, shards: int) -> str:
    words = [f"stage {stage}"] * (stages > 1) + [f"shard {shard}"] * (shards > 1)
    return ", ".join(words) or "whole model"


def _name_gpus(places: Sequence[Place]) -> dict[str, str]:
    """Number the GPUs on each node. Return unique ID -> name: `n1/cuda:0`, or `cuda:0` if there is
    only one node."""
    names: dict[str, str] = {}
    several = len({place.node for place in places}) > 1
    numbers: Counter[str] = Counter()
    for place in places:
        for gpu in place.gpus:
            if gpu not in names:
                node = f"{place.node}/" if several else ""
                names[gpu] = f"{node}cuda:{numbers[node]}"
                numbers[node] += 1
    return names


def _index_of_device(place: Place, places: Sequence[Place], number: int) -> int:
    """Return the index of a rank's device `number` among the GPUs it sees.

    If multiple ranks see the same GPUs, they take turns choosing one. A rank that has GPUs to itself
    uses them in order.
    """
    together = [other for other in places if other.node == place.node and other.gpus == place.gpus]
    return (number * len(together) + together.index(place)) % len(place.gpus)
