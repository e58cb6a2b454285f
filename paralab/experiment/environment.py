"""This machine as paralab sees it: what was probed, what cannot be used and why."""

from __future__ import annotations

from paralab.launch.inspect import inspect_machine
from paralab.machine.precision import probe_cpu
from paralab.record.folder import PACKAGES, version
from paralab.show.facts import Environment


def environment() -> Environment:
    """The machine as paralab sees it; low precisions are tried out if necessary."""
    machine = inspect_machine()
    precisions = {
        "fp64": {"cpu": "usable"},
        "fp32": {"cpu": "usable"},
        "tf32": {"cpu": "not usable: a mode of NVIDIA GPUs"},
    }
    for name in ("bf16", "fp16"):
        tried = probe_cpu(name)
        precisions[name] = {"cpu": ("usable: " if tried.works else "not usable: ") + tried.seen}
    for name, found in precisions.items():
        weak = (
            [gpu.name for gpu in machine.gpus if gpu.capability < (8, 0)]
            if name in ("tf32", "bf16")
            else []
        )
        if not machine.gpus:
            found["cuda"] = f"not usable: {machine.no_gpu_reason}"
        else:
            found["cuda"] = (
                f"not usable: {weak[0]} is older than compute capability 8.0" if weak else "usable"
            )
    several = len(machine.gpus) > 1 and "nccl" in machine.backends
    backends = {
        "gloo": "usable: CPU ranks, and ranks that share a GPU"
        if "gloo" in machine.backends
        else "not in this torch",
        "nccl": "usable"
        if several
        else "not usable: "
        + ("not in this torch" if "nccl" not in machine.backends else "needs a GPU per rank"),
    }
    packages = {name: version(name) for name in PACKAGES}
    return Environment(machine=machine, precisions=precisions, backends=backends, packages=packages)
