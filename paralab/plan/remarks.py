"""Remarks that users should read before they use a plan's timings or compare its weights."""

from __future__ import annotations

from collections.abc import Iterable

from paralab.machine.host import Machine
from paralab.plan.batch_plan import BatchPlan
from paralab.plan.layout import Layout
from paralab.plan.plan import RankPlan, Reason
from paralab.plan.precision import LOW_PRECISIONS
from paralab.plan.request import Request
from paralab.units import plural
from paralab.workload.summary import Summary

# Names of optimizers that divide each gradient by its size contain one of these.
ADAPTIVE = ("Ada", "RMSprop", "Rprop", "NAdam", "RAdam")
# A run folder stores remarks as sentences. These words identify remarks about shared hardware.
SHARE_CORES = "share cores"
SHARED_DEVICE = "shared:"


def find_sharing(remarks: Iterable[str]) -> str:
    """Return the remark about hardware that multiple devices share, or an empty string."""
    words = (SHARE_CORES, SHARED_DEVICE)
    return next((remark for remark in remarks if any(word in remark for word in words)), "")


def remarks_on(request: Request, machine: Machine, layout: Layout, threads: int) -> tuple[str, ...]:
    """Describe virtual and shared devices. Users see the remarks with the plan and all timings."""
    remarks = []
    devices, places = layout.devices, layout.places
    nodes = len({place.node for place in places})
    cores = round(sum(place.cores for place in places)) or machine.cores

    if any(cell.virtual for cell in devices.values()):
        unit = "ranks" if len(layout.cells) > 1 else "threads"
        where = f"the CPUs of {nodes} nodes" if nodes > 1 else "one CPU"
        remarks.append(f"virtual devices: {len(devices)} shares of {where}, run by {unit}")
        if request.strategy == "dp":
            remarks.append("DataParallel is emulated: nn.DataParallel does nothing without a GPU")
    if layout.device == "cpu" and len(devices) * threads > cores:
        per_device = plural(threads, "thread")
        remarks.append(
            f"the devices {SHARE_CORES}: {len(devices)} devices × {per_device} > "
            f"{plural(cores, 'core')}, so real devices would be faster"
        )

    shared = ", ".join(name for name, cell in devices.items() if cell.shared)
    if request.placement == "same":
        where = f"all of a rank's stages are on one device ({shared})"
        remarks.append(f"{where}, so there is no model parallelism")
    elif shared:
        works = f"{shared} does the work of multiple devices"
        remarks.append(f"{SHARED_DEVICE} {works}, so no speed-up is possible")
    return tuple(remarks)


def remark_on_mps(reasons: Iterable[Reason]) -> list[str]:
    """Say why `--mps` has no effect, if that is so."""
    off = [each for each in reasons if each.choice == "MPS" and each.value == "off"]
    return [f"--mps has no effect: {each.because.removeprefix('requested; ')}" for each in off]


def remark_on_samples(batch_size: int, samples: int | None, name: str) -> list[str]:
    """Say that steps are smaller than a full batch because an epoch has fewer samples."""
    if samples is None or samples >= batch_size:
        return []
    return [
        f"an epoch of {name} has {plural(samples, 'sample')}, fewer than the batch of {batch_size}, "
        "so each step trains on the entire epoch"
    ]


def differences_of(
    summary: Summary,
    precision: str,
    batch: BatchPlan,
    ranks: tuple[RankPlan, ...],
    layout: Layout,
    compiled: bool = False,
) -> tuple[str, ...]:
    """List legitimate reasons why the results will differ from a single device."""
    differences = []
    parts = batch.replicas * batch.accumulate * batch.micro_batches
    is_split, shards = parts > 1, batch.shards > 1
    on_several_gpus = layout.device == "cuda" and len(layout.devices) > 1

    if summary.batch_norms and is_split:
        copies = " (including copies that pad micro-batches to the same size)"
        padded = "" if ranks[0].stage is None else copies
        differences.append(
            f"BatchNorm ({plural(summary.batch_norms, 'layer')}) normalizes over the samples in "
            f"one forward pass{padded}, not over the entire batch"
        )
    if (summary.dropout or summary.random) and (is_split or shards or on_several_gpus):
        source = "dropout" if summary.dropout else "the forward pass"
        differences.append(f"{source} draws different random numbers when the work is split")
    if summary.dropout and compiled:
        differences.append("dropout draws different random numbers in compiled code")
    if summary.state and is_split:
        names = ", ".join(summary.state[:3]) + (", …" if len(summary.state) > 3 else "")
        differences.append(
            f"every forward pass changes {names}, and a split batch needs more forward passes with "
            "fewer samples each"
        )
    if summary.casts and precision == "fp64" and (is_split or shards):
        differences.append(
            "the model casts to fp32, which amplifies the rounding of sums in a different order"
        )
    if precision in LOW_PRECISIONS:
        differences.append(f"{precision} rounds every product, so the order of summation matters")
    if precision == "fp32" and any(name in summary.optimizer for name in ADAPTIVE):
        differences.append(
            f"{summary.optimizer} divides each gradient by its size, which amplifies fp32 rounding "
            "of tiny gradients (use fp64 to rule out other causes)"
        )
    return tuple(differences)
