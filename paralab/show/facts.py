"""`paralab list` and `paralab env`: what you can run, and what this machine can run."""

from paralab.machine.host import Machine
from paralab.plan.request import STRATEGIES
from paralab.record.types import Record
from paralab.show.console import print_facts
from paralab.units import plural, size
from paralab.workload.catalog import BUILT_IN


class WorkloadEntry(Record, frozen=True, kw_only=True):
    about: str
    sizes: dict[str, dict[str, int]]


class Catalog(Record, frozen=True, kw_only=True):
    """The catalog that `list --json` prints."""

    strategies: dict[str, str]
    workloads: dict[str, WorkloadEntry]


class Environment(Record, frozen=True, kw_only=True):
    """What `env --json` prints. A precision or backend is `usable` or `not usable: reason`."""

    machine: Machine
    precisions: dict[str, dict[str, str]]  # device -> precision -> whether it is usable
    backends: dict[str, str]
    packages: dict[str, str | None]


def catalog() -> Catalog:
    workloads = {
        name: WorkloadEntry(about=entry.about, sizes={s: dict(n) for s, n in entry.sizes.items()})
        for name, entry in BUILT_IN.items()
    }
    return Catalog(strategies=dict(STRATEGIES), workloads=workloads)


def print_catalog(found: Catalog) -> None:
    workloads = {
        name: f"{entry.about}; sizes: {', '.join(f'{name}:{size}' for size in entry.sizes)} "
        "(the first is the default)"
        for name, entry in found.workloads.items()
    }
    yours = "yours: a function that returns paralab.Workload(model=…, data=…, loss=…)"
    facts = {**found.strategies, "": "", **workloads, "FILE.py:FUNCTION": yours}
    print_facts(facts.items(), style="bold")


def print_environment(found: Environment) -> None:
    machine = found.machine
    cores = plural(machine.cores, "usable core")
    facts = {"cpu": f"{machine.cpu}, {cores}, {size(machine.memory_bytes)} memory"}
    for number, gpu in enumerate(machine.gpus):
        capability = f"compute capability {'.'.join(map(str, gpu.capability))}"
        facts[f"cuda:{number}"] = f"{gpu.name}, {size(gpu.memory_bytes)}, {capability}"
    if not machine.gpus:
        facts["gpu"] = f"none: {machine.no_gpu_reason}; devices are shares of the CPU"
    cuda = machine.cuda or "none"
    facts["versions"] = f"Python {machine.python}, torch {machine.torch}, CUDA {cuda}"
    facts |= found.backends
    for precision, devices in found.precisions.items():
        shown = devices if machine.gpus else {"cpu": devices["cpu"]}
        facts[precision] = "; ".join(f"{device}: {state}" for device, state in shown.items())
    print_facts(facts.items())
