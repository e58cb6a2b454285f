"""Report what this machine can run, what it cannot, and why."""

from paralab.launch.inspect import inspect_machine
from paralab.machine.host import Machine
from paralab.machine.mps import probe_mps, running_daemon
from paralab.machine.precision import probe_cpu
from paralab.plan.precision import too_old
from paralab.record.folder import PACKAGES, version
from paralab.show.facts import Environment


def environment() -> Environment:
    """Inspect the machine, and try low precisions if necessary."""
    machine = inspect_machine()
    precisions = {
        "fp64": {"cpu": "usable"},
        "fp32": {"cpu": "usable"},
        "tf32": {"cpu": "not usable: only NVIDIA GPUs support it"},
    }
    for name in ("bf16", "fp16"):
        tried = probe_cpu(name)
        precisions[name] = {"cpu": ("usable: " if tried.works else "not usable: ") + tried.reason}
    for name, devices in precisions.items():
        devices["cuda"] = _usable_on_gpus(name, machine)

    nccl = "usable" if len(machine.gpus) > 1 else "not usable: needs a GPU per rank"
    backends = {
        "gloo": "usable: CPU ranks, and ranks that share a GPU",
        "nccl": nccl,
        "local": "usable: ranks on this machine, through shared memory (CPU) or CUDA IPC",
    }
    if machine.gpus:
        tried, running = probe_mps(), running_daemon()
        hint = (
            ""
            if running
            else "; --mps starts a daemon for one run, "
            "and nvidia-cuda-mps-control -d starts one that keeps running"
        )
        backends["mps"] = ("usable: " if tried.works else "not usable: ") + tried.reason + hint
    for name in {"gloo", "nccl", "local"} - set(machine.backends):
        missing = "needs Linux" if name == "local" else "this torch is built without it"
        backends[name] = f"not usable: {missing}"
    packages = {name: version(name) for name in PACKAGES}
    return Environment(machine=machine, precisions=precisions, backends=backends, packages=packages)


def _usable_on_gpus(precision: str, machine: Machine) -> str:
    if not machine.gpus:
        return f"not usable: {machine.no_gpu_reason}"
    if weak := too_old(precision, machine):
        return f"not usable: {weak[0].name} has a compute capability below 8.0"
    return "usable"
