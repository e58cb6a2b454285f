"""`Layout`: which devices a run's ranks use, on this machine or where they were launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from paralab.errors import UsageError
from paralab.machine.host import Machine
from paralab.plan.batch_plan import BatchPlan
from paralab.plan.batches import chunk_sizes, pieces, shares
from paralab.plan.grid import PROCESS_PER_REPLICA, Device, Place, grid
from paralab.plan.plan import RankPlan, Reasons
from paralab.plan.request import Request, cells_per_replica, has_process_per_cell, has_shards
from paralab.units import plural


@dataclass(frozen=True)
class Layout:
    """Which devices each rank uses.

    device  the kind of device: cpu or cuda
    cells   the devices, one row per rank
    places  where the ranks are, if another launcher started them
    """

    device: str
    cells: list[list[Device]]
    places: Sequence[Place]

    @property
    def devices(self) -> dict[str, Device]:
        return {cell.name: cell for row in self.cells for cell in row}


def choose_device(request: Request, machine: Machine, reasons: Reasons) -> str:
    """Choose cpu or cuda."""
    gpus = len(machine.gpus)
    if request.device == "cuda" and not gpus:
        raise UsageError(
            f"--device cuda needs a GPU, but this machine has none: {machine.no_gpu_reason}.",
            fix="--device cpu (CPU ranks), or leave out --device",
        )
    given = None if request.device == "auto" else request.device
    because = f"found {plural(gpus, 'GPU')}" if gpus else f"no GPU: {machine.no_gpu_reason}"
    return reasons.choose("device", given, "cuda" if gpus else "cpu", because)


def count_launched(request: Request, places: Sequence[Place]) -> Request:
    """Set the number of replicas, stages, or shards from the number of launched ranks."""
    if not places:
        return request
    if request.schedule and request.strategy == "pipeline":
        return replace(request, stages=request.stages or len(places))
    if request.strategy in ("tp", "cp", "ep"):
        return replace(request, shards=request.shards or len(places))
    if request.replicas is not None or request.strategy not in PROCESS_PER_REPLICA:
        return request
    return replace(request, replicas=max(1, len(places) // cells_per_replica(request)))


def lay_out(
    request: Request, batch: BatchPlan, machine: Machine, device: str, places: Sequence[Place]
) -> Layout:
    gpus = len(machine.gpus) if device == "cuda" else 0
    # With ZeRO-1, each rank has a replica.
    zero_1 = request.strategy == "fsdp" and request.zero == 1
    strategy = "ddp" if zero_1 else request.strategy
    placement, process_per_cell = request.placement or "spread", has_process_per_cell(request)
    shape = strategy, batch.replicas, batch.stages, placement, gpus, process_per_cell
    if places:
        ranks = len(grid(*shape, shards=batch.shards))
        _require_launched(request, ranks, places, device)
    return Layout(device, grid(*shape, places, batch.shards), places)


def _require_launched(request: Request, needed: int, places: Sequence[Place], device: str) -> None:
    """Require a matching number of launched ranks, and a GPU for each if the run uses GPUs."""
    launched = len(places)
    if needed != launched:
        names = ("replicas", "stages", "shards")
        given = {name: getattr(request, name) for name in names}
        options = "".join(f" --{name} {number}" for name, number in given.items() if number)
        commands = f"torchrun --nproc_per_node={needed}, srun -n {needed}"
        fix = f"launch {plural(needed, 'rank')} ({commands})"
        if request.strategy in ("tp", "cp", "ep"):
            fix = f"leave out --shards, or {fix}"
        elif request.strategy in PROCESS_PER_REPLICA:
            fix = f"leave out --replicas, or {fix}"
        elif needed == 1:
            fix = f"paralab run {request.strategy} without torchrun or srun, or use ddp"
        raise UsageError(
            f"{request.strategy}{options} needs {plural(needed, 'rank')}, but {launched} "
            f"{'was' if launched == 1 else 'were'} launched.",
            fix=fix,
        )
    blind = [place.node for place in places if not place.gpus]
    if device == "cuda" and blind:
        raise UsageError(
            f"Rank 0 sees a GPU, but a rank on {blind[0]} sees none.",
            fix="--device cpu, or launch each rank with a GPU",
        )


def plan_ranks(request: Request, batch: BatchPlan, layout: Layout) -> tuple[RankPlan, ...]:
    """Return each rank's samples and devices."""
    processes = batch.replicas if request.strategy in PROCESS_PER_REPLICA else 1
    per_replica = shares(batch.batch_size, processes)
    stages: list[int | None] = list(range(batch.stages)) if request.schedule else [None]
    is_split = has_shards(request)
    shards: list[int | None] = list(range(batch.shards)) if is_split else [None]
    owners = [*product(range(len(per_replica)), stages, shards)]

    ranks = []
    for rank, ((replica, stage, shard), row) in enumerate(zip(owners, layout.cells, strict=True)):
        samples = per_replica[replica]
        split = (samples,) * len(row)
        if request.strategy == "dp":
            # DataParallel splits each accumulation step separately, so sum each replica's shares.
            splits = [
                chunk_sizes(stop - start, batch.replicas)
                for [(start, stop)] in pieces(samples, batch.accumulate, 1)
            ]
            split = tuple(sum(column) for column in zip(*splits, strict=True))
        place = layout.places[rank] if layout.places else Place("", rank, (), 0.0)
        owner = replica, stage, place.node, shard
        ranks.append(RankPlan(rank, place.local_rank, tuple(row), samples, split, *owner))
    return tuple(ranks)


def count_threads(
    request: Request, machine: Machine, layout: Layout, asked: int | None, reasons: Reasons
) -> int:
    """Choose the number of CPU threads per device. `asked` is OMP_NUM_THREADS."""
    cores: float = machine.cores
    devices = len(layout.devices)
    because = f"{plural(machine.cores, 'core')} ÷ {plural(devices, 'device')}, at least 1"
    if layout.places:  # all ranks get the same number, so use the fewest cores of any rank
        cores = min(place.cores for place in layout.places)
        devices = -(-devices // len(layout.places))
        because = f"{plural(cores, 'core')} per rank ÷ {plural(devices, 'device')}, at least 1"
    if asked:
        because = "OMP_NUM_THREADS"
        because += " (torchrun sets it to 1 by default)" if layout.places and asked == 1 else ""

    threads = asked or max(1, int(cores / devices))
    return reasons.choose("threads per device", request.threads_per_device, threads, because)
