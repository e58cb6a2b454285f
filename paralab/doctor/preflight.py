"""Preflight: check this machine and its allocation before training. `gather_facts` takes the
measurements, and the machine checks judge them.

An unknown fact is None, and `unknown` gives the reason. This process never imports torch;
child processes do.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from paralab.doctor.environment import (
    Address,
    Disk,
    Launch,
    Memory,
    Port,
    inspect_address,
    inspect_cgroup,
    inspect_disk,
    inspect_network,
    inspect_port,
    launch_of,
    resolve,
)
from paralab.doctor.probes import Gpu, Link, Pair, Torch, driver_gpus, gpu_pairs, two_ranks
from paralab.doctor.registry import Finding, MachineFact
from paralab.machine.host import cpu_name, memory_bytes, usable_cores
from paralab.machine.precision import Probe, probe_cpu
from paralab.units import plural, size

PRECISIONS = ("bf16", "fp16")
PRECISION_SECONDS = 15.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Facts:
    environment: Mapping[str, str]  # environment variables that affect training
    launch: Launch
    cores: int  # cores that this process may use
    machine_cores: int
    cpu: str = "unknown"
    memory_bytes: int | None = None
    cgroup: Memory | None = None
    driver_gpus: tuple[Gpu, ...] | None = None
    torch: Torch | None = None
    port: Port | None = None
    address: Address | None = None
    host: str = ""
    host_address: str | None = None
    shared_bytes: int | None = None  # free bytes in /dev/shm
    disks: tuple[Disk, ...] = ()
    open_files: int | None = None  # soft limits of a process; None means unlimited
    locked_bytes: int | None = None
    megabits: Mapping[str, int] = field(default_factory=dict)  # for each active interface
    infiniband: tuple[str, ...] = ()
    precisions: Mapping[str, Probe] = field(default_factory=dict)
    link: Link | None = None
    pairs: tuple[Pair, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)  # name of a row -> why it is unknown

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.torch.gpus if self.torch else ()

    @property
    def ranks_here(self) -> int | None:
        """Return the number of ranks on this machine: from the launcher, or else one per GPU."""
        return self.launch.local_ranks or len(self.gpus) or None

    def evidence(self, *names: str) -> tuple[str, ...]:
        """Return rows as evidence for a finding. `table` derives its verdicts from them."""
        values = dict(rows(self))
        return tuple(f"{n}: {values.get(n) or self.unknown.get(n, 'not set')}" for n in names)


CONCERNS = tuple("CUDA_ NCCL_ GLOO_ TORCH_ TORCHELASTIC_ OMP_ MKL_ ONEDNN_ SLURM_ TP_".split())


def gather_facts(environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> Facts:
    """Gather all facts. Nothing else runs while the all-reduce is timed."""
    unknown: dict[str, str] = {}
    launch = launch_of(environment)
    with ThreadPoolExecutor(max_workers=2) as pool:
        probes = pool.map(lambda name: probe_cpu(name, PRECISION_SECONDS), PRECISIONS)
        precisions = dict(zip(PRECISIONS, probes, strict=True))
    for name in PRECISIONS:
        if "did not finish" in precisions[name].reason:  # the machine was busy
            unknown[f"{name} on CPU"] = precisions.pop(name).reason
    torch, link = two_ranks("gloo")
    if torch is None:
        unknown["torch"] = f"cannot import it: {link.problem}"
    gpus = torch.gpus if torch else ()
    seen_gpus = driver_gpus()
    if seen_gpus is None:
        unknown["GPUs (driver)"] = "nvidia-smi is missing or does not respond"
    pairs = gpu_pairs(len(gpus)) if len(gpus) > 1 and torch and "nccl" in torch.backends else ()
    if not pairs:
        unknown["GPU pairs"] = f"needs two GPUs and NCCL; torch sees {plural(len(gpus), 'GPU')}"
    megabits = inspect_network()
    infiniband = tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*")))
    if not infiniband and not megabits:
        unknown["network"] = "no active interface reports its speed"
    host = platform.node()
    host_address, unresolved = resolve(host)
    if host_address is None:
        unknown["host name"] = f"{host} does not resolve: {unresolved}"
    if not SHARED_MEMORY.is_dir():
        unknown["shared memory"] = f"there is no {SHARED_MEMORY}"
    folders = dict.fromkeys((folder or Path.cwd(), Path(tempfile.gettempdir())))
    names = [name for name in environment if name.startswith(CONCERNS) or name in launch.variables]
    return Facts(
        environment={name: environment[name] for name in names},
        launch=launch,
        cores=usable_cores(),
        machine_cores=os.cpu_count() or 1,
        cpu=cpu_name(),
        memory_bytes=memory_bytes(),
        cgroup=inspect_cgroup(),
        driver_gpus=seen_gpus,
        torch=torch,
        port=inspect_port(environment),
        address=inspect_address(environment),
        host=host,
        host_address=host_address,
        shared_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        disks=tuple(map(inspect_disk, folders)),
        open_files=_soft_limit("RLIMIT_NOFILE"),
        locked_bytes=_soft_limit("RLIMIT_MEMLOCK"),
        megabits=megabits,
        infiniband=infiniband,
        precisions=precisions,
        link=link,
        pairs=pairs,
        unknown=unknown,
    )


def _soft_limit(name: str) -> int | None:
    try:
        import resource
    except ImportError:  # Windows lacks it
        return None
    value = resource.getrlimit(getattr(resource, name))[0]
    return None if value == resource.RLIM_INFINITY else value


def rows(facts: Facts) -> Iterator[tuple[str, str | None]]:
    """Yield each fact as (name, value). The value is None if it is unknown or not set."""
    yield "cores", f"{facts.cores} of {facts.machine_cores} usable ({facts.cpu})"
    yield "memory", _memory(facts)
    yield "torch", _text(facts.torch)
    yield "GPUs (driver)", None if facts.driver_gpus is None else _named(facts.driver_gpus)
    yield "GPUs (torch)", _named(facts.gpus) if facts.torch else None
    yield "CUDA_VISIBLE_DEVICES", facts.environment.get("CUDA_VISIBLE_DEVICES")
    yield "launcher", _text(facts.launch)
    threads = plural(facts.torch.threads, "compute thread") if facts.torch else None
    yield "threads", threads and f"{threads} per process"
    yield "port", _text(facts.port)
    yield "MASTER_ADDR", _text(facts.address)
    yield "host name", f"{facts.host} is {facts.host_address}" if facts.host_address else None
    shared = facts.shared_bytes
    yield "shared memory", None if shared is None else f"{size(shared)} free in {SHARED_MEMORY}"
    for disk in facts.disks:
        writable = "" if disk.writable else ", not writable"
        yield f"disk {disk.path}", f"{size(disk.free_bytes)} free{writable}"
    files, locked = facts.open_files, facts.locked_bytes
    yield "open files", "unlimited" if files is None else f"at most {files}"
    yield "locked memory", "unlimited" if locked is None else f"at most {size(locked)}"
    yield "network", _network(facts)
    for name in PRECISIONS:
        yield f"{name} on CPU", facts.precisions[name].reason if name in facts.precisions else None
    yield "TORCH_DISTRIBUTED_DEBUG", facts.environment.get("TORCH_DISTRIBUTED_DEBUG")
    yield "all-reduce", _text(facts.link)
    if not facts.pairs:
        yield "GPU pairs", None
    for pair in facts.pairs:
        yield f"GPU pair {'-'.join(pair.direct.ranks)}", str(pair.direct)


def table(facts: Facts, findings: Sequence[Finding]) -> list[MachineFact]:
    found = []
    untimed = {str(link) for link in _links(facts) if link.seconds is None}
    for name, value in rows(facts):
        about = [f for f in findings if any(e.startswith(f"{name}: ") for e in f.evidence)]
        shown, verdict = value, "not checked" if value in untimed else "good"
        if value is None:
            shown = facts.unknown.get(name)
            verdict = "not checked" if name in facts.unknown else "not set"
        if about:
            verdict = ", ".join(dict.fromkeys(f"{f.severity} {f.id}" for f in about))
        found.append(MachineFact(name, shown, verdict, tuple(f.id for f in about)))
    return found


def _links(facts: Facts) -> list[Link]:
    return [*filter(None, [facts.link]), *(pair.direct for pair in facts.pairs)]


def _text(part: object) -> str | None:
    return None if part is None else str(part) or None


def _memory(facts: Facts) -> str | None:
    if facts.memory_bytes is None:
        return None
    group = facts.cgroup or Memory()
    limit = f", {size(group.limit_bytes)} allowed" if group.limit_bytes else ""
    killed = plural(group.killed or 0, "process")
    killed = f", {killed} killed because memory ran out" if group.killed else ""
    return f"{size(facts.memory_bytes)}{limit}{killed}"


def _named(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.name} ({size(gpu.memory_bytes)})" for gpu in gpus) or "none"


def _network(facts: Facts) -> str | None:
    cards = [f"{name} {speed / 1000:g} Gbit/s" for name, speed in facts.megabits.items()]
    return ", ".join([*cards, *(f"InfiniBand {name}" for name in facts.infiniband)]) or None
