"""The start of a job: the order of the first calls, the devices of the ranks, the same model
everywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.registry import check
from paralab.doctor.script.agreement import is_alone
from paralab.doctor.script.modules import is_copy, layers, parts, wrappings
from paralab.doctor.script.naming import COLLECTIVES, DDP, SAMPLER
from paralab.doctor.script.pointing import called, found, line_of, place, short
from paralab.doctor.script.questions import depends_on_rank, is_of_each_rank, origins, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.settings import (
    INIT,
    SET_DEVICE,
    backends,
    destination,
    is_global_rank,
    where,
)
from paralab.doctor.script.values import (
    Branch,
    Call,
    Constant,
    Made,
    Object,
    Trying,
    Value,
    With,
    options,
)

_GUARDS = ("torch.distributed.is_initialized", "torch.distributed.is_available")
_NEEDS_A_GROUP = (
    DDP,
    SAMPLER,
    "torch.distributed.get_rank",
    "torch.distributed.get_world_size",
    *sorted(COLLECTIVES),
)


@check("L06", source="script")
def before_the_group_exists(script: Script) -> Iterator[Finding]:
    starts = [call for call in script.calls_of(INIT) if not is_alone(call)]
    if not starts:
        return
    first = min(starts, key=lambda call: call.number)
    for call in sorted(script.calls_of(*_NEEDS_A_GROUP), key=lambda call: call.number):
        if call.number > first.number:
            return
        if (
            call.target == SAMPLER
            and call.argument(1, "num_replicas") is not None
            and call.argument(2, "rank") is not None
        ):
            continue
        if any(_asks_for_group(branch) for branch in call.inside(Branch)) or any(
            call.inside(Trying)
        ):
            continue
        why = (
            f"`{called(call)}` needs a process group, and comes before `{called(first)}` in {place(first, call)}: "
            '"Default process group has not been initialized".'
        )
        fix = f"Call `{called(first)}` first."
        yield found(script, "L06", "error", call, why, fix, also=(first,))
        return


def _asks_for_group(branch: Branch) -> bool:
    return any(
        isinstance(origin, Made) and origin.call.target in _GUARDS
        for origin in origins(branch.test)
    )


# --- devices
# ----------------------------------------------------------------------------------------------------------------------


@check("L03", source="script")
def one_gpu_for_all_ranks(script: Script) -> Iterator[Finding]:
    if not {"nccl", None, "?"} & backends(script) or _sees_its_own(script):
        return
    chosen = list(script.calls_of(SET_DEVICE))
    fixed = [call for call in chosen if where(call.argument(0, "device")).startswith("cuda:")]
    if fixed and len(fixed) == len(chosen):
        device = where(fixed[0].argument(0, "device"))
        why = (
            f"`{line_of(script, fixed[0])}` chooses {device} on every rank: with more than one rank per machine NCCL refuses "
            '("Duplicate GPU detected"). Certain unless the launcher shows each rank one GPU only.'
        )
        yield found(
            script,
            "L03",
            "suspect",
            fixed[0],
            why,
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])).',
        )
        return
    if chosen or any(
        where(call.keywords.get("device_id")) == "own" for call in script.calls_of(INIT)
    ):
        return
    for wrapping, module in wrappings(script):
        moves = _moves(script, module, wrapping)
        places = {where(destination(move)) for move in moves}
        if moves and all(place == "cuda" or place.startswith("cuda:") for place in places):
            move = moves[-1]
            why = (
                f"`{line_of(script, move)}` puts the model on {where(destination(move))} on every rank, and "
                "torch.cuda.set_device is "
                'never called: all ranks of a machine use GPU 0 and NCCL refuses ("Duplicate GPU detected"). Certain unless the '
                "launcher shows each rank one GPU only."
            )
            fix = (
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of CUDA.'
            )
            yield found(script, "L03", "suspect", move, why, fix, also=(wrapping,))


def _sees_its_own(script: Script) -> bool:
    """The script sets CUDA_VISIBLE_DEVICES itself."""
    return any(
        isinstance(node, ast.Constant) and node.value == "CUDA_VISIBLE_DEVICES"
        for node in script.all_nodes
    )


def _moves(script: Script, module: Value | None, before: Call) -> list[Call]:
    """The calls that move a module to a device before it is wrapped."""
    whole = {id(option) for option in options(module)} if module else set()
    upstream = {id(origin) for origin in origins(module)} if module else set()
    found = []
    for call in script.methods("to", "cuda"):
        if (
            call.number < before.number
            and call.receiver is not None
            and destination(call) is not None
        ):
            same = (
                any(id(option) in whole for option in options(call.receiver))
                or id(call.result) in upstream
            )
            found.extend([call] if same and where(destination(call)) != "?" else [])
    return found


@check("L04", source="script")
def cuda_before_the_device_is_chosen(script: Script) -> Iterator[Finding]:
    chosen = sorted(
        (call for call in script.calls_of(SET_DEVICE) if not is_alone(call)),
        key=lambda call: call.number,
    )
    if not chosen or not any(True for _ in script.calls_of(INIT)) or _sees_its_own(script):
        return
    for call in script.calls:
        if call.number > chosen[0].number:
            break
        if (
            call.method in ("cuda", "to")
            and call.receiver is not None
            and where(destination(call)) == "cuda"
        ):
            why = (
                f"`{line_of(script, call)}` uses the current CUDA device before `{called(chosen[0])}` "
                f"({place(chosen[0], call)}) has chosen it: every rank puts this on GPU 0, and keeps some hundred MB there."
            )
            fix = f"Call `{called(chosen[0])}` before the first use of CUDA."
            yield found(script, "L04", "error", call, why, fix, also=(chosen[0],))
            return


@check("L04", source="script")
def device_by_global_rank(script: Script) -> Iterator[Finding]:
    for call in script.calls_of(SET_DEVICE):
        if is_global_rank(call.argument(0, "device")):
            why = (
                f"`{line_of(script, call)}` takes the rank among all machines as the number of a GPU of this machine. Certain "
                "with more than one machine: rank 8 has no GPU 8 there."
            )
            yield found(
                script,
                "L04",
                "suspect",
                call,
                why,
                'Use the local rank: int(os.environ["LOCAL_RANK"]).',
            )


@check("L08", source="script")
def device_ids_of_a_cpu_model(script: Script) -> Iterator[Finding]:
    if any(
        True for _ in script.calls_of("torch.set_default_device", "torch.set_default_tensor_type")
    ):
        return
    for wrapping, module in wrappings(script):
        given = wrapping.argument(1, "device_ids")
        if (
            given is None
            or not all(_is_device_list(way) for way in options(given))
            or not _is_plain(script, module)
        ):
            continue
        if _is_moved(script, module, wrapping):
            continue
        why = (
            f"`{short(wrapping.node)}` names devices, but the model was never moved to one: its parameters are on the CPU, "
            "and DDP refuses device_ids for CPU modules."
        )
        fix = "Move the model first (`model.to(device)`), or leave device_ids out when it stays on the CPU."
        yield found(script, "L08", "error", wrapping, why, fix)


def _is_device_list(value: Value) -> bool:
    return (
        not (isinstance(value, Constant) and value.value is None)
        and type(value).__name__ == "Items"
    )


def _is_plain(script: Script, module: Value) -> bool:
    """A module that is made in the script, so that all that happens to it is known; with no device
    given where it is made."""
    known = all(
        (isinstance(way, Object) or "module" in roles(way)) and not is_copy(way)
        for way in options(module)
    )
    made = [
        value.made
        for value in parts(script, module).values()
        if isinstance(value, Object) and value.made
    ]
    return known and not any("device" in call.keywords for call in (*layers(script, module), *made))


def _is_moved(script: Script, module: Value, wrapping: Call) -> bool:
    inside = parts(script, module)
    moves = (
        call
        for call in script.methods("to", "cuda", "xpu", "to_empty")
        if call.receiver and call.number < wrapping.number
    )
    if any(id(option) in inside for call in moves for option in options(call.receiver or Value())):
        return True
    blocks = (block for layer in layers(script, module) for block in layer.inside(With))
    return any(
        isinstance(m, Made) and m.call.target == "torch.device"
        for block in blocks
        for m in block.managers
    )


# --- the model
# --------------------------------------------------------------------------------------------------------------------


@check("L07", source="script")
def model_differs_between_ranks(script: Script) -> Iterator[Finding]:
    for wrapping, module in wrappings(script):
        for layer in layers(script, module):
            sizes = [
                *layer.args,
                *(
                    value
                    for name, value in layer.keywords.items()
                    if name not in ("device", "dtype")
                ),
            ]
            if any(
                not isinstance(value, Made) and depends_on_rank(value) and is_of_each_rank(value)
                for value in sizes
            ):
                why = (
                    f"The size of `{short(layer.node)}` depends on the rank, so the ranks build different models; DDP "
                    f"({place(wrapping, layer)}) refuses them, or mixes up their gradients."
                )
                fix = "Build the model from values that are the same on all ranks; broadcast what one rank has found out."
                yield found(script, "L07", "error", layer, why, fix, also=(wrapping,))
                break
