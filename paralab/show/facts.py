"""`paralab list` and `paralab env`: what you can run, and what this machine can run."""

from __future__ import annotations

from paralab.machine.host import Machine
from paralab.plan.request import STRATEGIES
from paralab.record.types import Record
from paralab.show.console import fact_table, show_table
from paralab.units import size
from paralab.workload.catalog import BUILT_IN


class WorkloadEntry(Record, frozen=True, kw_only=True):
    about: str
    sizes: dict[str, dict[str, int]]


class Catalog(Record, frozen=True, kw_only=True):
    """The catalog that `list --json` prints."""

    strategies: dict[str, str]
    workloads: dict[str, WorkloadEntry]


class Environment(Record, frozen=True, kw_only=True):
    """The environment that `env --json` prints. A precision or backend is `usable` or `not usable:
    reason`."""

    machine: Machine
    precisions: dict[str, dict[str, str]]  # by device
    backends: dict[str, str]
    packages: dict[str, str | None]


def catalog() -> Catalog:
    workloads = {
        name: WorkloadEntry(
            about=entry.about, sizes={size: dict(n) for size, n in entry.sizes.items()}
        )
        for name, entry in BUILT_IN.items()
    }
    return Catalog(strategies=dict(STRATEGIES), workloads=workloads)


def print_catalog() -> None:
    table = fact_table()
    table.columns[0].style = "bold"
    for name, about in STRATEGIES.items():
        table.add_row(name, about)
    table.add_row("", "")
    for name, entry in BUILT_IN.items():
        table.add_row(
            name,
            f"{entry.about}; sizes: {', '.join(f'{name}:{s}' for s in entry.sizes)} (the first is the default)",
        )
    table.add_row(
        "FILE.py:FUNCTION",
        "yours: a function that returns paralab.Workload(model=…, data=…, loss=…)",
    )
    show_table(table)


def print_environment(found: Environment) -> None:
    machine = found.machine
    table = fact_table()
    table.add_row(
        "cpu",
        f"{machine.cpu}, {machine.cores} usable cores, {size(machine.memory_bytes)} memory",
    )
    if machine.gpus:
        for number, gpu in enumerate(machine.gpus):
            capability = ".".join(map(str, gpu.capability))
            table.add_row(
                f"cuda:{number}",
                f"{gpu.name}, {size(gpu.memory_bytes)}, compute capability {capability}",
            )
    else:
        table.add_row("gpu", f"none: {machine.no_gpu_reason}; devices are shares of the CPU")
    table.add_row(
        "versions",
        f"Python {machine.python}, torch {machine.torch}, CUDA {machine.cuda or 'none'}",
    )
    for name, state in found.backends.items():
        table.add_row(name, state)
    for name, where in found.precisions.items():
        shown = where if machine.gpus else {"cpu": where["cpu"]}
        table.add_row(name, "; ".join(f"{device}: {state}" for device, state in shown.items()))
    show_table(table)
