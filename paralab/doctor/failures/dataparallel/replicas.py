"""The models that DataParallel wraps, and how it splits a batch."""

import ast
import math
from collections.abc import Iterator
from typing import cast

from paralab.doctor.static.facts import Call, once_per_node
from paralab.doctor.static.names import DP
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script


def pieces(batch: int, devices: int) -> int:
    """Return the number of chunks that scatter makes: 9 samples on 4 GPUs become 3 + 3 + 3."""
    return math.ceil(batch / math.ceil(batch / devices)) if batch else 0


def classes_in(script: Script, wrap: Call) -> Iterator[Scope]:
    """Yield the project classes of the wrapped model."""
    made = script.makers(wrap.argument(0, "module"), wrap.scope)
    yield from (call.made for call in made if call.made is not None)


def wrapper_of(script: Script, node: ast.expr | None, scope: Scope) -> Call | None:
    """Return the DataParallel call that made a value, if the value is definitely wrapped."""
    if node is None or script.kinds(node, scope) != {"dp"}:
        return None
    return next((call for call in script.makers(node, scope) if call.target == DP), None)


def gpus_of(script: Script, wrap: Call) -> int | None:
    """Return the number of device_ids, if the script shows it: `[0, 1]` or `list(range(4))`."""
    return _length(script, wrap.argument(1, "device_ids"), wrap.scope)


@once_per_node(cast("int | None", None))
def _length(script: Script, node: ast.expr, scope: Scope) -> int | None:
    match node:
        case ast.List() | ast.Tuple():
            return len(node.elts)
        case ast.Call(ast.Name("list"), [inner]):
            return _length(script, inner, scope)
        case ast.Call(ast.Name("range"), [stop]):
            value = script.evaluate(stop, scope, 0)
            return value if isinstance(value, int) else None
        case ast.Name() | ast.Attribute():
            definitions = script.reaching(node, scope)
            lengths = {_length(script, *v) for one in definitions for v in script.sources(one)}
            return lengths.pop() if len(lengths) == 1 else None
    return None
