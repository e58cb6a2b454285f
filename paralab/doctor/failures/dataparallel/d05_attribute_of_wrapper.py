"""D05: The script looks for a model attribute on the wrapper.

Symptom: "'DataParallel' object has no attribute 'weight'".
Cause: The wrapper is a separate module, and the model is its `.module`.
Fix: Read `model.module.weight`.

  model = nn.DataParallel(net)
- print(model.weight.norm())
+ print(model.module.weight.norm())
"""

import ast
import re

from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.context import catches
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.names import DDP, DP
from paralab.doctor.static.project import Module, Scope, position
from paralab.doctor.static.report import at, code, found, line_of, replace
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"'(?P<wrapper>DataParallel|DistributedDataParallel)' object has no attribute '(?P<name>\w+)'",
        "The script reads `{name}` from the {wrapper} wrapper{at}; only the model inside has it.",
        fix="Use model.module.{name}.",
    ),
)


# Public names of nn.Module, DataParallel, and DistributedDataParallel.
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
# Conditions that may tell whether the model is wrapped.
_ABOUT_WRAPPERS = re.compile(
    r"modul|model|distrib|ddp|parallel|gpu|world|attr|isinstance|proc|single", re.I
)


def _is_of_wrapper(name: str) -> bool:
    return name in _OWN or name.startswith("_")


@check("D05", source="script")
def attribute_of_wrapper(script: Script) -> Findings:
    """Report an attribute of the inner model that the script reads from the wrapper."""
    for module in script.modules if script.calls_of(DDP, DP) else ():
        for node in module.nodes:
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            if _is_of_wrapper(node.attr) or node.attr in script.attributes:
                continue
            scope = module.scope_of(node)
            wrap, doubt = _wrapper(script, node, scope)
            if wrap is None or catches(node, module, "AttributeError"):
                continue
            inner = script.makers(wrap.argument(0, "module"), wrap.scope)
            makers = script.makers(node.value, scope) if doubt else inner
            owners = [made.made for made in makers if made.made is not None]
            of_torch = (
                bool(inner)
                and not doubt
                and all(one.target.startswith("torch.nn.") for one in inner)
            )
            if not of_torch and not (
                owners
                and all(script.method(o, node.attr) or script.stored(o, node.attr) for o in owners)
            ):
                continue  # another wrapper, such as DeepSpeed's engine, may have the attribute
            where = at(node, module.scope)
            why = (
                f"`{node.attr}` belongs to the inner model, not to the wrapper ({line_of(wrap, where)}), so this "
                "raises an AttributeError."
            )
            edits = replace(script, module, node.value, f"{code(node.value)}.module")
            fix = f"Go through the wrapper: `.module.{node.attr}`."
            doubt = "if it is an attribute of the model" if of_torch else doubt
            also = (wrap,)
            yield found(
                script, "D05", "error", where, why, fix, doubt=doubt, also=also, edits=edits
            )


def _wrapper(script: Script, node: ast.Attribute, scope: Scope) -> tuple[Call | None, str]:
    """Return the call that wraps the attribute's object, and a doubt unless the object is
    definitely a wrapper at this point."""
    kinds = script.kinds(node.value, scope)
    makers = script.makers(node.value, scope)
    wraps = [one for one in makers if one.target in (DDP, DP)]
    if len(wraps) != 1 or kinds.isdisjoint({"ddp", "dp"}):
        return None, ""
    tests = [one for one in script.context(node, scope.module) if isinstance(one, If)]
    if kinds in ({"ddp"}, {"dp"}) and len(makers) == 1:
        tests = [one for one in tests if "model" in code(one.test)]
        known = all(script.decide(one, scope, 1) is True for one in tests)
        return (wraps[0] if known else None), ""
    tests = [one for one in tests if _ABOUT_WRAPPERS.search(code(one.test, 200))]
    later = wraps[0].scope is not scope or position(wraps[0].node) < position(node)
    parts = [part for part, _ in script.ingredients(node.value, scope)]
    unwrapped = any(isinstance(one, ast.Attribute) and one.attr == "module" for one in parts)
    hidden = not later or tests or unwrapped
    return (None if hidden else wraps[0]), "if the model is wrapped here"


@check("D05", source="script")
def attribute_of_prepared(script: Script) -> Findings:
    """Flag an attribute of a model that the script reads after Accelerate wrapped it in DDP."""
    calls = script.methods_on("accelerator", "prepare", "prepare_model")
    trained = script.methods("train", "parameters", "requires_grad_") if calls else []
    models = {dotted_key(one.receiver) for one in trained if one.receiver is not None} - {None}
    for module in dict.fromkeys(one.module for one in calls):
        attributes = [one for one in module.nodes if isinstance(one, ast.Attribute)]
        own = {dotted_key(one) for one in attributes if isinstance(one.ctx, ast.Store)}
        for node in attributes:
            if dotted_key(node.value) not in models or dotted_key(node) in own:
                continue
            scope = module.scope_of(node)
            values = [one.value for one in script.reaching(node.value, scope)]
            made = [script.call_at.get(one) for one in values if one is not None]
            wrap = next((one for one in calls if one in made), None)
            if wrap is None or _is_of_wrapper(node.attr) or _is_guarded(script, node, module):
                continue
            models.discard(dotted_key(node.value))  # one finding for each model
            where = at(node, module.scope)
            why = f"With multiple processes, Accelerate wraps the model in DDP ({line_of(wrap, where)}), which has no `{node.attr}`."
            fix = f"Use `accelerator.unwrap_model({code(node.value)}).{node.attr}`."
            doubt = (
                "if the job runs with DDP, not with FSDP or DeepSpeed, and only the model has it"
            )
            yield found(script, "D05", "suspect", where, why, fix, doubt=doubt, also=(wrap,))


def _is_guarded(script: Script, node: ast.Attribute, module: Module) -> bool:
    """Return whether the script handles both cases here: a wrapped model and a plain one."""
    tests = [one for one in script.context(node, module) if isinstance(one, If) and not one.exits]
    mentions = any(_ABOUT_WRAPPERS.search(code(one.test, 200)) for one in tests)
    return mentions or catches(node, module, "AttributeError")
