"""H01: Ranks have different numbers of batches.

Symptom: Training hangs near the end of an epoch, until a timeout ('Timed out waiting … for recv operation').
Cause: One rank runs out of batches and stops calling backward. The other ranks wait for it in the all-reduce.
Fix: Give every rank the same number of batches (DistributedSampler, drop_last), or use `with model.join():`.
Reported: pytorch/pytorch#33148 #38174 microsoft/PyMarlin#80 Lightning-AI/pytorch-lightning#20404 #9851

- mine = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
- loader = DataLoader(mine, batch_size=32)
+ mine = DistributedSampler(data, drop_last=True)
+ loader = DataLoader(data, batch_size=32, sampler=mine)
"""

import ast
import re

from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import With
from paralab.doctor.static.names import COLLECTIVES, DDP
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import at, code, found
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__)

EVALUATION = re.compile(r"eval|valid|test|infer|predict", re.IGNORECASE)


@check("H01", source="script")
def every_nth_item(script: Script) -> Findings:
    """Report `files[rank::world_size]` in a script that trains with DDP."""
    if not script.calls_of(DDP) or not script.methods("backward") or _agrees_on_length(script):
        return
    for module in script.modules:
        for node in module.nodes:
            scope = module.scope_of(node)
            data = _strided(script, node, scope)
            if data is None or _is_divisible(script, data, scope):
                continue
            why = (
                f"`{code(node)}` gives each rank every n-th item. If the items do not divide evenly, some "
                "ranks get one more and wait for the others in the last `backward()`."
            )
            doubt = "if the numbers of batches differ"
            yield found(script, "H01", "suspect", at(node, scope), why, doubt=doubt)


def _agrees_on_length(script: Script) -> bool:
    """Return whether ranks use `with model.join():` or exchange the length of their data."""
    blocks = [one.item for call in script.methods("backward") for one in call.inside(With)]
    names = [dotted_key(one.func) or "" for one in blocks if isinstance(one, ast.Call)]
    if any(name.endswith(("Join", ".join")) for name in names):
        return True
    given = [part for call in script.methods(*COLLECTIVES) for part in ast.walk(call.node)]
    return any(isinstance(one, ast.Call) and dotted_key(one.func) == "len" for one in given)


def _strided(script: Script, node: ast.AST, scope: Scope) -> ast.expr | None:
    """Return the data in `data[rank::world]`, `range(rank, len(data), world)`, or `islice(…)`."""
    match node:
        case ast.Subscript(data, ast.Slice(first, None, step)) if first is not None:
            pass
        case ast.Call(ast.Name("range"), [first, data, step]):
            pass
        case ast.Call(function, [data, first, _, step]) if code(function).endswith("islice"):
            pass
        case _:
            return None
    if step is None or EVALUATION.search(code(data)):
        return None
    # If a slice starts at the rank, its step is the world size, whatever the variable is called.
    return data if script.nature(first, scope) == "rank" else None


def _is_divisible(script: Script, data: ast.expr, scope: Scope) -> bool:
    """Return whether the script drops the remainder or creates a multiple of 8 rows."""
    for part, _ in script.ingredients(data, scope):
        if isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Mod, ast.FloorDiv)):
            return True
        match part:
            case ast.Call(
                ast.Attribute(_, "randn" | "rand" | "zeros" | "ones" | "arange"), [rows, *_]
            ):
                if isinstance(rows, ast.Constant) and isinstance(rows.value, int):
                    return rows.value % 8 == 0
    return False
