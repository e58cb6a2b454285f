"""Is there enough for every rank? GPUs, cores, memory, room on disks, limits, and precisions that
work."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.failures.launch.l09_threads_and_cores import judge_threads
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.preflight import Facts
from paralab.doctor.registry import check
from paralab.units import plural, size

WORKERS = 2  # loader workers of a rank, and batches that each holds ready: what a modest script has
PREFETCHED = 2
BATCH_BYTES = 32 * 3 * 224 * 224 * 4  # 32 pictures as floats
RANK_BYTES = (
    2**30
)  # of the host's memory: torch alone takes a third of it, with CUDA more than half
MANY_CORES = 4  # per rank: with one thread, three of them idle
UNEQUAL = 0.75  # nn.DataParallel's own bar


@check("L03", source="machine")
def visible_devices(facts: Facts) -> Iterator[Finding]:
    asked = facts.environment.get("CUDA_VISIBLE_DEVICES")
    seen = facts.driver_gpus or ()
    if asked is not None:
        names = [name.strip() for name in asked.split(",")]
        evidence = facts.seen("CUDA_VISIBLE_DEVICES")
        twice = sorted({name for name in names if name and names.count(name) > 1})
        beyond = [
            name
            for name in names
            if name.isdigit() and facts.driver_gpus is not None and int(name) >= len(seen)
        ]
        if twice:
            why = (
                f"CUDA_VISIBLE_DEVICES={asked} names GPU {', '.join(twice)} twice: CUDA then shows none, or two ranks get the "
                "same one."
            )
            yield Finding("L03", "error", why, "Each GPU once.", evidence=evidence)
        elif beyond and seen:
            why = (
                f"CUDA_VISIBLE_DEVICES={asked}, but this machine has {plural(len(seen), 'GPU')}, from 0 on: CUDA ignores "
                f"{beyond[0]} and all after it."
            )
            yield Finding(
                "L03", "error", why, f"Numbers from 0 to {len(seen) - 1}.", evidence=evidence
            )
        elif asked.strip() in ("", "-1") and seen:
            why = (
                f"CUDA_VISIBLE_DEVICES={asked!r} hides all {plural(len(seen), 'GPU')} of this machine: the training would run on "
                "the CPU."
            )
            yield Finding(
                "L03",
                "warning",
                why,
                "unset CUDA_VISIBLE_DEVICES, unless the CPU is meant.",
                evidence=evidence,
            )
    ranks = facts.launch.local_ranks
    if ranks and facts.gpus and ranks > len(facts.gpus) and not _one_each(facts):
        why = (
            f"{ranks} ranks on this machine, and torch sees {plural(len(facts.gpus), 'GPU')}: two ranks would share one, which "
            "NCCL refuses."
        )
        fix = f"At most {plural(len(facts.gpus), 'rank')} on this machine (--nproc_per_node), or backend='gloo'."
        yield Finding("L03", "error", why, fix, evidence=facts.seen("GPUs (torch)", "launcher"))


def _one_each(facts: Facts) -> bool:
    """Every task of Slurm sees its own GPUs only: then fewer than ranks is right."""
    on_node = facts.environment.get("SLURM_GPUS_ON_NODE", "")
    enough = on_node.isdigit() and int(on_node) >= (facts.launch.local_ranks or 0)
    return enough or "SLURM_GPUS_PER_TASK" in facts.environment


@check("L05", source="machine")
def missing_backend(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None:
        return
    if facts.driver_gpus and "nccl" not in facts.torch.backends:
        built = (
            "without CUDA"
            if facts.torch.cuda is None
            else f"for CUDA {facts.torch.cuda}, without NCCL"
        )
        why = (
            f"This machine has {plural(len(facts.driver_gpus), 'GPU')}, and torch {facts.torch.version} is built {built}: "
            "backend='nccl' fails."
        )
        fix = "Install torch for CUDA (pytorch.org, Get Started), or train on the CPU with backend='gloo'."
        yield Finding("L05", "error", why, fix, evidence=facts.seen("torch", "GPUs (driver)"))
    elif not facts.torch.backends:
        why = f"torch {facts.torch.version} is built without torch.distributed: neither gloo nor NCCL."
        yield Finding(
            "L05", "error", why, "Install torch from its own wheels.", evidence=facts.seen("torch")
        )


@check("L09", source="machine")
def threads(facts: Facts) -> Iterator[Finding]:
    ranks, launch = facts.launch.local_ranks, facts.launch
    if facts.torch is None or not ranks or ranks < 2:
        return
    asked = facts.environment.get("OMP_NUM_THREADS", "")
    share = facts.cores // ranks
    if launch.by == "torchrun" and not asked:
        return  # torchrun itself sets 1 then
    crowded = judge_threads(facts.torch.threads, ranks, facts.cores, "rank")
    if crowded and facts.torch.threads > 1:
        yield Finding(
            "L09", "warning", crowded.why, crowded.fix, evidence=facts.seen("threads", "cores")
        )
    elif asked == "1" and share >= MANY_CORES:
        why = (
            f"OMP_NUM_THREADS=1 with {facts.cores} cores for {ranks} ranks: torch computes with one thread where {share} are "
            "free. Certain "
            "if the ranks compute on the CPU: transforms, losses, offloaded optimizers."
        )
        yield Finding(
            "L09",
            "suspect",
            why,
            f"OMP_NUM_THREADS={share}.",
            evidence=facts.seen("threads", "cores"),
        )


@check("L10", source="machine")
def illegal_instruction(facts: Facts) -> Iterator[Finding]:
    for name, probe in facts.precisions.items():
        if "SIGILL" not in probe.seen:
            continue
        sure: Severity = "warning" if facts.gpus else "error"
        fix = " ".join(f"{variable}={value}" for variable, value in probe.environment.items())
        why = f"{name} on this CPU: {probe.seen}. The CPU lists instructions (AMX) that this virtual machine does not allow."
        fix = (
            f"export {fix} before Python starts: tried, it works."
            if fix
            else f"Train in fp32 on this CPU; {name} on a GPU."
        )
        yield Finding("L10", sure, why, fix, evidence=facts.seen(f"{name} on CPU"))


@check("L11", source="machine")
def small_shared_memory(facts: Facts) -> Iterator[Finding]:
    ranks = facts.ranks_here or 2
    needed = ranks * WORKERS * PREFETCHED * BATCH_BYTES
    if facts.shared_bytes is None or facts.shared_bytes >= needed:
        return
    why = (
        f"/dev/shm has {size(facts.shared_bytes)}; {ranks} ranks × {WORKERS} loader workers × {PREFETCHED} batches of "
        f"{size(BATCH_BYTES)} (32 pictures) "
        f"are {size(needed)}: a worker that finds no room dies of a bus error. Certain if your own batches need that much."
    )
    yield Finding(
        "L11",
        "suspect",
        why,
        "docker run --shm-size=8g, or --ipc=host; or num_workers=0.",
        evidence=facts.seen("shared memory"),
    )


@check("D07", source="machine")
def unequal_gpus(facts: Facts) -> Iterator[Finding]:
    if len(facts.gpus) < 2:
        return
    large = max(facts.gpus, key=lambda gpu: gpu.memory_bytes)
    small = min(facts.gpus, key=lambda gpu: (gpu.memory_bytes, gpu.processors or 0))
    units = [gpu.processors for gpu in facts.gpus if gpu.processors]
    weaker = small.memory_bytes < UNEQUAL * large.memory_bytes or (
        bool(units) and min(units) < UNEQUAL * max(units)
    )
    if weaker:
        number = facts.gpus.index(small)
        why = (
            f"GPU {number} ({small.name}, {size(small.memory_bytes)}) is weaker than {large.name} ({size(large.memory_bytes)}): "
            "all wait for it."
        )
        fix = f"Leave it out: CUDA_VISIBLE_DEVICES without {number}; or smaller batches on it, weighted by their size."
        yield Finding("D07", "warning", why, fix, evidence=facts.seen("GPUs (torch)"))


@check("H12", source="machine")
def little_memory(facts: Facts) -> Iterator[Finding]:
    cgroup, ranks = facts.cgroup, facts.ranks_here or 2
    if cgroup is None:
        return
    if cgroup.limit_bytes is not None and cgroup.used_bytes is not None:
        left = cgroup.limit_bytes - cgroup.used_bytes
        if left < ranks * RANK_BYTES:
            why = (
                f"{size(left)} of the {size(cgroup.limit_bytes)} that this container or job may use is left, for {ranks} ranks of "
                "about "
                f"{size(RANK_BYTES)} each: the kernel kills one (SIGKILL) when it is used up. Certain if your ranks need that much."
            )
            yield Finding(
                "H12",
                "suspect",
                why,
                "More memory for the job (--mem, docker run --memory), or fewer ranks.",
                evidence=facts.seen("memory"),
            )
    if cgroup.killed:
        why = (
            f"The kernel has killed {plural(cgroup.killed, 'process')} of this container or job for want of memory. Certain if "
            "one was a rank."
        )
        yield Finding(
            "H12",
            "suspect",
            why,
            "More memory, smaller batches, fewer loader workers.",
            evidence=facts.seen("memory"),
        )
