"""`paralab list` and `paralab env`: what there is to run, and what to run it on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paralab.launch.inspect import look_at_machine
from paralab.machine.precision import probe_cpu
from paralab.plan.request import STRATEGIES
from paralab.record.folder import PACKAGES, version
from paralab.show.console import console, fact_table
from paralab.units import size
from paralab.workload.catalog import BUILT_IN


def catalog() -> dict[str, Any]:
    workloads = {
        name: {"about": entry.about, "sizes": {s: dict(n) for s, n in entry.sizes.items()}} for name, entry in BUILT_IN.items()
    }
    return {"strategies": dict(STRATEGIES), "workloads": workloads}


def print_catalog() -> None:
    table = fact_table()
    table.columns[0].style = "bold"
    for name, about in STRATEGIES.items():
        table.add_row(name, about)
    table.add_row("", "")
    for name, entry in BUILT_IN.items():
        table.add_row(name, f"{entry.about}; sizes: {', '.join(f'{name}:{s}' for s in entry.sizes)} (the first is the default)")
    table.add_row("FILE.py:FUNCTION", "your own: a function that returns paralab.Workload(model=…, data=…, loss=…)")
    console.print(table)


def environment() -> dict[str, Any]:
    """The machine as paralab sees it, with every low precision tried where a trial is needed."""
    machine = look_at_machine()
    precisions: dict[str, dict[str, Any]] = {
        "fp64": {"cpu": "usable"},
        "fp32": {"cpu": "usable"},
        "tf32": {"cpu": "not usable: a mode of NVIDIA GPUs"},
    }
    for name in ("bf16", "fp16"):
        tried = probe_cpu(name)
        precisions[name] = {"cpu": ("usable: " if tried.works else "not usable: ") + tried.seen}
    for name, found in precisions.items():
        weak = [gpu.name for gpu in machine.gpus if gpu.capability < (8, 0)] if name in ("tf32", "bf16") else []
        if not machine.gpus:
            found["cuda"] = f"not usable: {machine.no_gpu_reason}"
        else:
            found["cuda"] = f"not usable: {weak[0]} is older than compute capability 8.0" if weak else "usable"
    several = len(machine.gpus) > 1 and "nccl" in machine.backends
    backends = {
        "gloo": "usable: CPU ranks, and ranks that share a GPU" if "gloo" in machine.backends else "not in this torch",
        "nccl": "usable"
        if several
        else "not usable: " + ("not in this torch" if "nccl" not in machine.backends else "needs a GPU per rank"),
    }
    packages = {name: version(name) for name in PACKAGES}
    return {"machine": asdict(machine), "precisions": precisions, "backends": backends, "packages": packages}


def print_environment(found: dict[str, Any]) -> None:
    machine = found["machine"]
    table = fact_table()
    table.add_row("cpu", f"{machine['cpu']}, {machine['cores']} usable cores, {size(machine['memory_bytes'])} memory")
    if machine["gpus"]:
        for number, gpu in enumerate(machine["gpus"]):
            capability = ".".join(map(str, gpu["capability"]))
            table.add_row(f"cuda:{number}", f"{gpu['name']}, {size(gpu['memory_bytes'])}, compute capability {capability}")
    else:
        table.add_row("gpu", f"none: {machine['no_gpu_reason']}; devices are shares of the CPU's cores")
    table.add_row("versions", f"Python {machine['python']}, torch {machine['torch']}, CUDA {machine['cuda'] or 'none'}")
    for name, state in found["backends"].items():
        table.add_row(name, state)
    for name, where in found["precisions"].items():
        shown = where if machine["gpus"] else {"cpu": where["cpu"]}
        table.add_row(name, "; ".join(f"{device}: {state}" for device, state in shown.items()))
    console.print(table)
