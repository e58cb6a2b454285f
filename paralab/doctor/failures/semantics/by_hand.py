"""Find the calls with which a script itself averages gradients or weights, without DDP."""

import ast

from paralab.doctor.static.facts import Call
from paralab.doctor.static.script import Script

_REDUCE = (
    "all_reduce", "allreduce", "allreduce_", "reduce", "reduce_scatter", "all_gather",
    "all_reduce_coalesced",
)  # fmt: skip
_PARAMETERS = ("grad", "main_grad", "parameters", "named_parameters", "parameters_to_vector")


def gradient_reductions(script: Script, *more: str) -> list[Call]:
    """Return the collectives whose arguments or enclosing function use gradients or parameters."""
    return [call for call in script.methods(*_REDUCE, *more) if _sees_parameters(script, call)]


def _sees_parameters(script: Script, call: Call) -> bool:
    around = call.scope.node if call.scope.is_function else call.node
    if any(
        isinstance(node, ast.Attribute) and node.attr in _PARAMETERS for node in ast.walk(around)
    ):
        return True
    parts = (part for arg in call.node.args for part, _ in script.ingredients(arg, call.scope, 1))
    return any(
        part in script.call_at and script.call_at[part].last_name in _PARAMETERS for part in parts
    )
