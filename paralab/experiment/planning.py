"""Plan a configuration: inspect the machine and the workload, resolve, and record the plan."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from paralab.launch.inspect import Inspected, inspect_workload
from paralab.launch.job import Training
from paralab.launch.launched_by import refuse_inside
from paralab.launch.prove import prove_plan
from paralab.machine.host import Machine, threads_asked, usable_cores
from paralab.machine.mps import probe_mps
from paralab.machine.nccl import probe_nccl_sharing
from paralab.machine.precision import Probe, probe_cpu
from paralab.plan.check import check
from paralab.plan.expert_plan import without_proof
from paralab.plan.grid import Place
from paralab.plan.layout import count_launched
from paralab.plan.plan import Plan
from paralab.plan.request import (
    SHARDED,
    STAGED,
    Request,
    count_shards,
    has_shards,
    splits_experts,
    splits_layers,
    uses_blocks,
)
from paralab.plan.resolve import resolve
from paralab.record.folder import RunFolder
from paralab.units import count, plural, size
from paralab.workload.reference import check_reference
from paralab.workload.summary import Inspection, Summary


@cache
def _probe_once(what: str) -> Probe:
    """Try a precision on the CPU, or one of the ways to share a GPU."""
    others = {"mps": probe_mps, "nccl": probe_nccl_sharing}
    return others[what]() if what in others else probe_cpu(what)


_inspect = cache(inspect_workload)
_prove = cache(prove_plan)


def inspection_for(request: Request, strategies: Iterable[str], **more: Any) -> Inspection:
    """Return an inspection that collects what these strategies need."""
    names = set(strategies)
    more = {"blocks": uses_blocks(request)} | more
    return Inspection(
        check_reference(request.workload),
        request.device,
        layers=not names.isdisjoint(STAGED),
        units=not names.isdisjoint(SHARDED),
        **more,
    )


def inspect_once(request: Request, strategies: Iterable[str], **more: Any) -> Inspected:
    """Inspect a workload on one thread, once for all configurations of an experiment."""
    refuse_inside()
    more |= {"samples": request.batch_size, "threads": 1}
    return _inspect(inspection_for(request, strategies, **more))


def forget_inspections() -> None:
    """Clear the cache, because in a notebook a workload's file may have changed."""
    _inspect.cache_clear()
    _prove.cache_clear()


def make_plan(
    request: Request,
    places: Sequence[Place] = (),
    cuts: Sequence[str] = (),
    large: bool = False,
) -> tuple[Plan, Inspected]:
    """Resolve a configuration. This does not start any process except the child that inspects the
    workload.

    places  where the ranks already are, if torchrun or srun started them
    cuts    where the stages begin in the checkpoint that the run resumes from
    large   also plan a model that does not fit this machine
    """
    if not places:
        refuse_inside()
    check(request)
    request = replace(request, workload=check_reference(request.workload))
    samples = None  # per micro-batch, for timing layers; None: the workload's batch size
    if request.batch_size is not None:
        parts = (request.replicas or 1) * (request.accumulate or 1) * (request.micro_batches or 1)
        samples = max(1, request.batch_size // parts)
    replicas = request.replicas or (2 if request.strategy == "hybrid" else 1)
    cores = max(1, usable_cores() // (replicas * (request.stages or 2) * (request.shards or 1)))
    threads = request.threads_per_device or threads_asked() or cores  # threads of one device
    inspected = inspect_workload(
        inspection_for(request, [request.strategy], samples=samples, threads=threads, large=large)
    )
    return resolve_here(request, inspected, places, cuts), inspected


def resolve_here(
    request: Request,
    inspected: Inspected,
    places: Sequence[Place] = (),
    cuts: Sequence[str] = (),
) -> Plan:
    """Resolve a configuration in this process's environment. If it splits layers, sequences, or
    experts, first prove on CPU ranks what can be split."""
    if has_shards(request) or splits_experts(request):
        check(request)
        shards = count_shards(count_launched(request, places))
        field = what = "tensor" if splits_layers(request) else "sequence"
        plan: Any = None
        if splits_experts(request):
            field = what = "expert"
            plan = without_proof(inspected.summary.experts, shards)
        if request.sequence_parallel:
            what = "token"
        plan = plan or _prove(what, check_reference(request.workload), shards)
        summary = replace(inspected.summary, **{f"{field}_plan": plan})
        inspected = inspected._replace(summary=summary)
    return resolve(request, *inspected, _probe_once, threads_asked(), places, cuts)


def create_run(out: Path | None, plan: Plan, inspected: Inspected, **fields: Any) -> Training:
    """Create a run folder and write its manifest, before any rank starts."""
    folder = RunFolder.create(out, f"{plan.strategy}_{slug(inspected.summary.name)}")
    folder.write_manifest(
        machine=asdict(inspected.machine),
        plan=plan.to_json(),
        workload=asdict(inspected.summary),
        data_path=inspected.summary.data_path,
        constraints=constraints(plan, *inspected),
    )
    return Training(plan, folder, **fields)


def constraints(plan: Plan, machine: Machine, summary: Summary) -> list[str]:
    """Describe what the result depends on, in sentences for the manifest."""
    gpus = machine.gpus if plan.device == "cuda" else ()
    where = ", ".join(gpu.name for gpu in gpus) or machine.cpu
    lines = [
        f"model: {count(summary.parameters)} parameters, {size(summary.parameter_bytes)}",
        f"device: {plan.device} ({where}), {plural(plan.threads_per_device, 'thread')} per device, "
        f"{plural(machine.cores, 'core')}",
        f"backend: {plan.backend or 'none, one process'}; torch {machine.torch}, "
        f"CUDA {machine.cuda or 'none'}",
        f"memory: {size(machine.memory_bytes)} on the CPU"
        + "".join(f", {size(gpu.memory_bytes)} on {gpu.name}" for gpu in gpus),
        f"precision: {plan.precision}; batch: {plan.arithmetic}; seed {plan.seed}",
    ]
    return lines + list(plan.remarks) + list(plan.differences)


def slug(name: str) -> str:
    return re.sub(r"[\W_]", "-", name.removesuffix(".py")).strip("-")
