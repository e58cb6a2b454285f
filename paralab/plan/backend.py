"""How ranks exchange tensors: the torch.distributed backend, and what changes if ranks share a GPU.

Without MPS, processes take turns on a GPU, which switches whenever a rank waits for another, so one
large bucket is best. With MPS, small buckets overlap with the backward pass as usual.
docs/collectives.md has the measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from paralab.errors import UsageError
from paralab.machine.host import Machine
from paralab.machine.nccl import SHARE
from paralab.machine.precision import Probe
from paralab.plan.grid import PROCESS_PER_REPLICA
from paralab.plan.layout import Layout
from paralab.plan.plan import Reasons
from paralab.plan.request import BUCKETED, SPLIT, Request, has_process_per_cell
from paralab.units import size
from paralab.workload.summary import Summary

PREFERRED = ("nccl", "local", "gloo")  # the fastest backend first
DDP_BUCKET_MB = 25.0
# local's staging memory on a GPU (collectives/gpu_staging.py)
SLOTS, SMALLEST_SLOT, PART_OF_MEMORY = 3, 32 * 2**20, 64
# and on the CPU (collectives/staging.py, shared_memory.py)
CPU_SLOT, NOTES, NOTE_BYTES = 2 * 2**20, 2, 2**16
NCCL_SHARES = (2, 30)  # from this version on, several NCCL ranks may use one GPU (experimental)


def share_gpus(layout: Layout) -> bool:
    """Return whether multiple ranks use the same GPU."""
    users = Counter(name for row in layout.cells for name in {cell.name for cell in row})
    return layout.device == "cuda" and max(users.values()) > 1


def choose_backend(
    request: Request,
    machine: Machine,
    layout: Layout,
    probe: Callable[[str], Probe],
    reasons: Reasons,
) -> str | None:
    """Choose the backend. Return None for a single process."""
    if request.strategy not in (*PROCESS_PER_REPLICA, *SPLIT) and not request.schedule:
        if request.backend:
            raise UsageError(
                f"--backend {request.backend}: {request.strategy} without --schedule has one "
                "process, so no rank sends anything to another.",
                fix="leave out --backend, or add --schedule gpipe",
            )
        return None

    refused = _refuse(request, machine, layout, probe)
    possible = [name for name in PREFERRED if not refused[name]]
    if request.backend and refused[request.backend]:
        raise UsageError(
            f"--backend {request.backend} does not work here: {refused[request.backend]}.",
            fix=f"--backend {possible[0]}" if possible else "--device cpu",
        )
    if not possible:
        gpus = len({cell.name for row in layout.cells for cell in row})
        raise UsageError(
            f"{request.strategy}: no backend works here. "
            + "; ".join(f"{name}: {refused[name]}" for name in PREFERRED)
            + ".",
            fix=f"--device cpu, --replicas {gpus}, or use ddp",
        )
    because = {
        "nccl": "no two ranks share a GPU",
        "local": "the ranks share a GPU, which NCCL does not allow"
        if layout.device == "cuda"
        else "CPU ranks on one machine share memory",
        "gloo": "ranks share a GPU, which NCCL does not allow"
        if layout.device == "cuda"
        else "the ranks are CPU processes",
    }
    usual = next(name for name in possible if not (name == "nccl" and share_gpus(layout)))
    chosen: str = reasons.choose("backend", request.backend, usual, because[usual])
    return "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen


def _refuse(
    request: Request, machine: Machine, layout: Layout, probe: Callable[[str], Probe]
) -> dict[str, str]:
    """Return why each backend does not work here, or an empty string if it works."""
    shared, nodes = share_gpus(layout), len({place.node for place in layout.places}) or 1
    on_gpus = layout.device == "cuda"
    return {
        "nccl": "the ranks are CPU processes" * (not on_gpus)
        or (_refuse_nccl_sharing(request, machine, probe) if shared else ""),
        "local": f"the ranks are on {nodes} nodes, which do not share memory" * (nodes > 1)
        or "it needs Linux" * ("local" not in machine.backends),
        "gloo": "its sharded collectives crash on CUDA tensors"
        * (on_gpus and (request.zero or (3 if request.strategy == "fsdp" else 1)) != 1),
    }


def _refuse_nccl_sharing(request: Request, machine: Machine, probe: Callable[[str], Probe]) -> str:
    """Return why NCCL cannot serve ranks that share a GPU. If the user requests NCCL, run a
    trial."""
    if machine.nccl < NCCL_SHARES:
        version = ".".join(map(str, machine.nccl)) or "an unknown version"
        return f"ranks share a GPU, which NCCL does not allow before version 2.30 (here: {version})"
    if request.backend != "nccl":
        return "ranks share a GPU, which NCCL supports only experimentally"
    tried = probe("nccl")
    return "" if tried.works else f"ranks share a GPU, and NCCL failed in a trial: {tried.reason}"


def nccl_environment(layout: Layout, backend: str | None) -> dict[str, str]:
    """Return the variables that ranks need if they share a GPU over NCCL."""
    return SHARE if "nccl" in (backend or "") and share_gpus(layout) else {}


def choose_mps(
    request: Request, layout: Layout, probe: Callable[[str], Probe], reasons: Reasons
) -> bool:
    """Return whether to use MPS. If MPS does not work here, the run continues without it."""
    if not request.mps:
        return False
    if layout.device == "cpu":
        tried = Probe(False, "this run uses the CPU")
    elif layout.places:
        tried = Probe(False, "the ranks are already running; start the daemon before them")
    else:
        tried = probe("mps")
    reasons.add("MPS", "on" if tried.works else "off", f"requested; {tried.reason}")
    return tried.works


def choose_bucket(
    request: Request,
    machine: Machine,
    layout: Layout,
    summary: Summary,
    backend: str | None,
    mps: bool,
    reasons: Reasons,
) -> float | None:
    """Choose the size of DDP's buckets in MB. Return None for torch's default."""
    in_buckets = request.strategy in BUCKETED and not request.zero
    if not in_buckets and request.zero != 1:
        return request.bucket_mb
    default, because = None, "the default in PyTorch's DDP"
    text = "25 MB" if has_process_per_cell(request) else "25 MB, 1 MB for the first"
    if backend == "local" and share_gpus(layout) and not mps:
        default = math.ceil(summary.parameter_bytes / 2**20) + 1.0
        text, because = (
            f"{default:g} MB",
            "ranks take turns on the GPU; one bucket needs the fewest turns",
        )
    given = f"{request.bucket_mb:g} MB" if request.bucket_mb else None
    reasons.choose("bucket", given, text, because)
    return request.bucket_mb or default


def choose_staging(
    machine: Machine,
    layout: Layout,
    summary: Summary,
    backend: str | None,
    bucket_mb: float | None,
    reasons: Reasons,
) -> int:
    """Return the bytes of a rank's slots in each process group of `local`; 0 with other backends."""
    if backend != "local":
        return 0
    if layout.device == "cpu":
        return SLOTS * CPU_SLOT + NOTES * NOTE_BYTES
    bucket = min(summary.parameter_bytes, (bucket_mb or DDP_BUCKET_MB) * 2**20)
    staging = SLOTS * slot_bytes(int(bucket), min(gpu.memory_bytes for gpu in machine.gpus))
    because = "local's slots, outside of torch's allocator; they grow with the largest bucket"
    value = f"{size(staging)} per rank and process group, in GPU memory"
    reasons.add("staging", value, because)
    return staging


def slot_bytes(tensor_bytes: int, gpu_bytes: int) -> int:
    """Return the size of one of local's slots on a GPU, as in collectives/gpu_staging.py.

    24 MiB -> 32 MiB    340 MiB -> 512 MiB    3 GiB on a GPU with 24 GiB -> 128 MiB
    """
    most = max(SMALLEST_SLOT, gpu_bytes // PART_OF_MEMORY // SLOTS)
    return max(SMALLEST_SLOT, min(most, 1 << (tensor_bytes - 1).bit_length()))
