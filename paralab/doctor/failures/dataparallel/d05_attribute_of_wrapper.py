"""D05: The script looks for a model attribute on the wrapper.

Symptom: "'DataParallel' object has no attribute 'weight'".
Cause: The wrapper is a separate module, and the model is its `.module`.
Fix: Read `model.module.weight`.

  model = nn.DataParallel(net)
- print(model.weight.norm())
+ print(model.module.weight.norm())
"""

import ast

from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.context import catches
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.names import DDP, DP
from paralab.doctor.static.project import Scope, position
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


@check("D05", source="script")
def attribute_of_wrapper(script: Script) -> Findings:
    """Report an attribute of the inner model that the script reads from the wrapper."""
    for module in script.modules if script.calls_of(DDP, DP) else ():
        for node in module.nodes:
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            if node.attr in _OWN or node.attr.startswith("_") or node.attr in script.attributes:
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
    later = wraps[0].scope is not scope or position(wraps[0].node) < position(node)
    parts = [part for part, _ in script.ingredients(node.value, scope)]
    unwrapped = any(isinstance(one, ast.Attribute) and one.attr == "module" for one in parts)
    hidden = not later or tests or unwrapped
    return (None if hidden else wraps[0]), "if the model is wrapped here"
