"""nn.DataParallel: what its replicas lose, how it splits a batch, and what its wrapper does not
have."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from paralab.doctor.finding import Edit, Finding
from paralab.doctor.registry import check
from paralab.doctor.script.editing import swapped, with_keyword
from paralab.doctor.script.feeding import loaders_of
from paralab.doctor.script.naming import DP
from paralab.doctor.script.pointing import called, found
from paralab.doctor.script.questions import comes_from, is_forward, origins, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.settings import known_number
from paralab.doctor.script.turns import length
from paralab.doctor.script.updates import backwards
from paralab.doctor.script.values import (
    Attr,
    Call,
    Choice,
    Computed,
    Constant,
    Entered,
    Made,
    Object,
    Value,
    options,
)

# What wrappers have themselves: the public names of nn.Module, DataParallel and
# DistributedDataParallel.
_MODULE = """
    add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval extra_repr float forward
    get_buffer get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia named_buffers named_children
    named_modules named_parameters parameters register_backward_hook register_buffer register_forward_hook
    register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook
    register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory state_dict to to_empty train training
    type xpu zero_grad
"""
_WRAPPERS = """
    module device_ids output_device dim src_device_obj gather scatter replicate parallel_apply no_sync join join_device
    join_process_group join_hook register_comm_hook device device_type is_multi_device_module process_group device_mesh
    broadcast_buffers bucket_cap_mb find_unused_parameters gradient_as_bucket_view static_graph reducer logger
    require_backward_grad_sync require_forward_param_sync will_sync_module_buffers mixed_precision parameters_to_ignore
    broadcast_bucket_size bucket_bytes_cap ddp_uneven_inputs_config use_side_stream_for_tensor_copies modules_buffers
    forward_sync_buffers init_sync_buffers skip_all_reduce_unused_params bucket_bytes_cap_default bucket_bytes_cap_list buffer_hook
    has_custom_per_bucket_caps named_module_buffers batched_grad_copy to_kwargs compute_bucket_size_limits
"""
_OWN = frozenset((*_MODULE.split(), *_WRAPPERS.split()))


def _wrapped(value: Value | None) -> Call | None:
    """The DataParallel call behind a value."""
    ways = options(value) if value else ()
    return next((way.call for way in ways if isinstance(way, Made) and way.call.target == DP), None)


def _gpus(wrapper: Call) -> int | None:
    return length(wrapper.argument(1, "device_ids"))


# --- D01: one loss per GPU
# -------------------------------------------------------------------------------------------------------


@check("D01", source="script")
def one_loss_per_gpu(script: Script) -> Iterator[Finding]:
    for backward in backwards(script):
        forward = _as_returned(backward.loss)
        wrapper = _wrapped(forward.receiver) if forward else None
        if forward is None or wrapper is None or _gpus(wrapper) == 1:
            continue
        inside = [value for value in forward.result.parents if value is not forward.receiver]
        known = any(comes_from(value, "loss value") or _calls_a_loss(value) for value in inside)
        why = (
            f"`{called(forward)}(…)` in line {forward.line} computes the loss inside the model. DataParallel gathers one per GPU, "
            "so this is a vector, and `backward` wants a scalar: `grad can be implicitly created only for scalar outputs`."
        )
        if not known:
            why += " Certain if the model returns a loss and there are several GPUs."
        fix = "Average over the GPUs first: `loss.mean().backward()`."
        edits = _averaged(script, backward.call)
        yield found(
            script,
            "D01",
            "error" if known else "suspect",
            backward.call,
            why,
            fix,
            also=(forward, wrapper),
            edits=edits,
        )


def _as_returned(loss: Value) -> Call | None:
    """The forward whose result (or a part of it) the loss is, but for factors, whichever way it
    came."""
    if isinstance(loss, Made):
        return loss.call if is_forward(loss.call) else None
    if isinstance(loss, Choice):
        ways = [_as_returned(option) for option in loss.options]
        return ways[0] if None not in ways else None
    if isinstance(loss, Attr):
        return _as_returned(loss.base)
    if isinstance(loss, Computed) and loss.op in ("Part", "Index", "Div", "Mult"):
        return next((call for parent in loss.parents if (call := _as_returned(parent))), None)
    return None


def _calls_a_loss(value: Value) -> bool:
    made = (origin.call for origin in origins(value) if isinstance(origin, Made))
    return any(call.method == "__call__" and "loss" in roles(call.receiver) for call in made)


def _averaged(script: Script, call: Call) -> tuple[Edit, ...]:
    node = call.node
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or not isinstance(node.func.value, ast.Name)
    ):
        return ()
    return swapped(script, call.file, node.func.value, f"{node.func.value.id}.mean()")


# --- D03: a batch that does not reach all GPUs
# -----------------------------------------------------------------------------------


def chunks(batch: int, gpus: int) -> int:
    """How many parts DataParallel makes of a batch: 9 over 4 GPUs are 3 + 3 + 3, and the fourth
    gets nothing."""
    return math.ceil(batch / math.ceil(batch / gpus)) if batch else 0


@check("D03", source="script")
def batch_that_does_not_reach_all_gpus(script: Script) -> Iterator[Finding]:
    said = set()
    for forward in script.calls:
        wrapper = _wrapped(forward.receiver) if is_forward(forward) else None
        gpus = _gpus(wrapper) if wrapper else None
        for loader in loaders_of([forward]) if gpus and gpus > 1 else ():
            size = known_number(script, loader.argument(1, "batch_size") or Constant(1))
            if (
                not isinstance(size, int)
                or size < 1
                or not gpus
                or not wrapper
                or id(loader) in said
            ):
                continue
            last = _last(loader, size)
            short = next(
                (batch for batch in (size, last) if batch and chunks(batch, gpus) < gpus), None
            )
            if short is None:
                continue
            said.add(id(loader))
            which = (
                f"A batch of {short}"
                if short == size
                else f"The last batch has {short} samples and"
            )
            why = (
                f"{which} is split into parts of {math.ceil(short / gpus)}: {chunks(short, gpus)} parts for {gpus} GPUs (line "
                f"{wrapper.line}). The rest has nothing to do, and a forward with arguments that are not split fails there with a "
                "missing argument."
            )
            fix = f"A batch that is a multiple of {gpus}, and `drop_last=True`."
            edits = (
                with_keyword(script, loader.file, loader.node, "drop_last=True")
                if short != size
                else ()
            )
            yield found(script, "D03", "warning", loader, why, fix, also=(wrapper,), edits=edits)


def _last(loader: Call, size: int) -> int | None:
    """The size of the last batch, where it is known and another one."""
    dropped, samples = loader.argument(8, "drop_last"), length(loader.argument(0, "dataset"))
    if samples is None or (
        dropped is not None and not (isinstance(dropped, Constant) and not dropped.value)
    ):
        return None
    return samples % size or None


# --- D04: what replicas forget; D05: what the wrapper does not have
# --------------------------------------------------------------


@check("D04", source="script")
def forgotten_in_replicas(script: Script) -> Iterator[Finding]:
    for store in script.stores:
        for entered in store.inside(Entered):
            call = entered.call
            wrapper = _wrapped(call.receiver) if call and is_forward(call) else None
            if wrapper is None:
                continue
            inner = [
                way
                for way in options(wrapper.argument(0, "module") or Value())
                if isinstance(way, Object)
            ]
            if (
                not any(way is one for way in options(store.base) for one in inner)
                or store.name == "[]"
            ):
                continue
            kept = any(
                isinstance(part, Constant | Attr) or _is_own(script, part, inner[0])
                for part in store.value.parents
            )
            why = (
                f"`self.{store.name}` is set in the forward of a model that line {wrapper.line} wraps in DataParallel. Each GPU "
                "works on a replica that is thrown away after the forward, and the value with it."
            )
            if not kept:
                why += " Certain if it is read after the forward."
            fix = "Return the value from the forward and keep it outside, or use DistributedDataParallel."
            yield found(
                script, "D04", "error" if kept else "suspect", store, why, fix, also=(wrapper,)
            )
            break


def _is_own(script: Script, value: Value, owner: Object) -> bool:
    """Computed from the object's own earlier state: a counter, a running mean."""
    held = {
        id(store.value)
        for store in script.stores
        if any(way is owner for way in options(store.base))
    }
    registered = {id(owner)}
    return any(
        id(o) in held or (isinstance(o, Attr) and id(o.base) in registered) for o in origins(value)
    )


@check("D05", source="script")
def attribute_of_the_wrapper(script: Script) -> Iterator[Finding]:
    stored = {store.name for store in script.stores if _is_wrapper(store.base)}
    for call in script.calls:
        for value in (call.function, call.receiver, *call.args):
            for attribute in _chain(value):
                name = attribute.name
                if (
                    name in _OWN
                    or name.startswith("_")
                    or name in stored
                    or not _is_wrapper(attribute.base)
                ):
                    continue
                wrapper = next(way.call for way in options(attribute.base) if isinstance(way, Made))
                kind = wrapper.target.rpartition(".")[2]
                known = _has(script, wrapper, name)
                why = f"`{name}` belongs to the model inside: `AttributeError: '{kind}' object has no attribute '{name}'`."
                why += f" The wrapper is made in line {wrapper.line}."
                if not known:
                    why += " Certain if it is an attribute of the model."
                edits = _through_module(script, call, name)
                fix = f"Go through the wrapper: `.module.{name}`."
                yield found(
                    script,
                    "D05",
                    "error" if known else "suspect",
                    call,
                    why,
                    fix,
                    also=(wrapper,),
                    edits=edits,
                )


def _is_wrapper(value: Value) -> bool:
    ways = list(options(value))
    return bool(ways) and all(isinstance(way, Made) and roles(way) & {"dp", "ddp"} for way in ways)


def _chain(value: Value | None) -> Iterator[Attr]:
    while isinstance(value, Attr):
        yield value
        value = value.base


def _has(script: Script, wrapper: Call, name: str) -> bool:
    for inner in options(wrapper.argument(0, "module") or Value()):
        if isinstance(inner, Object):
            if any(
                store.name == name and any(way is inner for way in options(store.base))
                for store in script.stores
            ):
                return True
            if any(getattr(statement, "name", None) == name for statement in inner.of.node.body):
                return True
    return False


def _through_module(script: Script, call: Call, name: str) -> tuple[Edit, ...]:
    for node in ast.walk(call.node):
        if isinstance(node, ast.Attribute) and node.attr == name:
            return swapped(script, call.file, node.value, f"{ast.unparse(node.value)}.module")
    return ()
