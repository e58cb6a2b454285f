"""How a script starts its process group: the backend, and the environment variables it sets."""

import ast
from collections.abc import Iterator

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import Call
from paralab.doctor.static.names import INIT
from paralab.doctor.static.report import Place
from paralab.doctor.static.script import Script


def backends(script: Script) -> set[str]:
    """Return the backends that may be passed to init_process_group: nccl, gloo, "default", or
    "unknown"."""
    return {_backend(script, call) for call in script.calls_of(INIT)}


def _backend(script: Script, call: Call) -> str:
    value = call.argument(0, "backend")
    if value is None:
        return "unknown" if call.unpacks else "default"
    known = script.evaluate(value, call.scope, 0)
    known = script.usual_value(value, call.scope) or known
    return known.lower() if isinstance(known, str) else "unknown"


def environment(script: Script) -> Iterator[tuple[str, object, Place]]:
    """Yield every environment variable that the script sets to a constant."""
    for module in script.modules:
        for node in module.nodes:
            if isinstance(node, ast.Call) and dotted_key(node.func) == "os.environ.update":
                for one in node.keywords:
                    if one.arg and isinstance(one.value, ast.Constant):
                        yield one.arg, one.value.value, Place(node, module)
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
                continue
            for target in node.targets:
                match target:
                    case ast.Subscript(
                        ast.Attribute(ast.Name("os"), "environ"), ast.Constant(name)
                    ):
                        yield str(name), node.value.value, Place(node, module)
