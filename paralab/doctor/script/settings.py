"""What a script is set up with: its backend, its devices, the defaults of its options."""

from __future__ import annotations

from typing import Any

from paralab.doctor.script.agreement import live
from paralab.doctor.script.questions import comes_from, depends_on_rank, number, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.values import Attr, Call, Choice, Computed, Constant, Items, Made, Value

INIT = "torch.distributed.init_process_group"
SET_DEVICE = "torch.cuda.set_device"


def ways(value: Value | None) -> list[Value]:
    """What a value may be in a job of several ranks."""
    if isinstance(value, Choice):
        return [way for option in live(value) for way in ways(option)]
    return [] if value is None else [value]


def default_of(script: Script, value: Value | None) -> Value | None:
    """`options.batch` is what `add_argument("--batch", default=…)` says, unless the user says
    otherwise."""
    if not isinstance(value, Attr) or "arguments" not in roles(value.base):
        return value
    for call in script.methods("add_argument"):
        names = [
            str(name.value).lstrip("-").replace("-", "_")
            for name in call.args
            if isinstance(name, Constant)
        ]
        wanted = call.keywords.get("dest")
        if value.name in names or (isinstance(wanted, Constant) and wanted.value == value.name):
            return call.keywords.get("default", value)
    return value


def known_number(script: Script, value: Value | None) -> int | float | None:
    return number(default_of(script, value))


def backends(script: Script) -> set[Any]:
    """The backends that init_process_group is given: nccl, gloo, None for torch's own choice, `?`
    for one that is not known."""
    found = set()
    for call in script.calls_of(INIT):
        for way in ways(default_of(script, call.argument(0, "backend"))) or [Constant(None)]:
            found.add(way.value if isinstance(way, Constant) else "?")
    return found


def uses_cuda(script: Script) -> bool:
    """Are there CUDA devices in the script at all?"""
    if "nccl" in backends(script) or any(True for _ in script.calls_of(SET_DEVICE)):
        return True
    return any(
        where(target) not in ("cpu", "?")
        for call in script.methods("to", "cuda")
        for target in [destination(call)]
    )


def destination(call: Call) -> Value | None:
    """The device that `.to(…)` or `.cuda(…)` moves to."""
    if call.method == "cuda":
        return call.argument(0, "device") or Constant("cuda")
    return call.argument(0, "device")


def where(device: Value | None) -> str:
    """`cpu`, `cuda` (the current one), `cuda:0` (fixed), `own` (different on each rank), or `?`."""
    found = {_where(way) for way in ways(device)}
    return found.pop() if len(found) == 1 else "own" if "own" in found else "?"


def _where(device: Value) -> str:
    if isinstance(device, Constant):
        if isinstance(device.value, int) and not isinstance(device.value, bool):
            return f"cuda:{device.value}"
        return (
            device.value
            if isinstance(device.value, str) and device.value.startswith(("cpu", "cuda"))
            else "?"
        )
    if comes_from(device, "rank"):
        return "own"
    if isinstance(device, Made) and device.call.target == "torch.device":
        kind, index = device.call.argument(0, "type"), device.call.argument(1, "index")
        if index is not None and where(kind) == "cuda":
            return where(index)
        return where(kind)
    if isinstance(device, Made) and device.call.target == "torch.cuda.current_device":
        return "cuda"
    if isinstance(device, Items) and device.items:
        return where(device.items[0])
    return "?"


def is_global_rank(value: Value | None) -> bool:
    """The rank among all ranks of all machines, as it is: not `rank % gpus`, not the local rank."""
    for way in ways(value):
        if isinstance(way, Computed) and way.op == "Mod":
            return False
        if isinstance(way, Made):
            call = way.call
            if call.target in ("builtins.int", "torch.device", "builtins.str"):
                return any(is_global_rank(part) for part in call.args)
            if call.target == "torch.distributed.get_rank":
                return True
            if call.target == "os.environ" and call.args and isinstance(call.args[0], Constant):
                return call.args[0].value in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
        if isinstance(way, Computed) and way.op == "FString":
            return any(is_global_rank(part) for part in way.parents)
    return False


def fixed_for_all(value: Value | None) -> bool:
    """Certainly the same on every rank."""
    return value is not None and not comes_from(value, "rank") and not depends_on_rank(value)
