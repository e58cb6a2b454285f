"""S15: More ranks, same learning rate. The id also covers a rate that is scaled twice.

Symptom: Fewer steps per epoch and slower progress than on one device; or a learning rate that is scaled twice.
Cause: With more ranks, the global batch grows, so each epoch has fewer, more precise steps.
Fix: Keep the global batch size, or scale the learning rate with it, but only once (linearly or by the square root).
Limits: A script does not show which rate was intended. Only scaling twice can be proven.

  loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
- optimizer = SGD(model.parameters(), lr=0.1)
+ optimizer = SGD(model.parameters(), lr=0.1 * dist.get_world_size())
"""

import ast

from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.facts import If
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import at, code, found
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__)
Product = tuple[ast.BinOp, Scope]


@check("S15", source="script")
def rate_scaled_twice(script: Script) -> Findings:
    """Report a learning rate that is multiplied by the world size more than once."""
    for call in script.calls:
        rate = call.argument(1, "lr") if call.target.startswith("torch.optim.") else None
        products = _products(script, rate, call.scope) if rate is not None else []
        if len(products) < 2:
            continue
        tests = [
            script.decide(one, scope, None)
            for node, scope in products
            for one in script.context(node, scope.module)
            if isinstance(one, If)
        ]
        places = [at(node, scope) for node, scope in products]
        why = (
            f"The learning rate of `{code(call.node.func)}` is multiplied by the number of ranks "
            f"{len(products)} times (lines {', '.join(str(place.line) for place in places)}). With 8 ranks, "
            f"that is {8 ** len(products)} times the base rate."
        )
        fix, doubt = "Multiply once.", "" if all(tests) else "if both lines run in one job"
        yield found(script, "S15", "error", call, why, fix, doubt=doubt, also=tuple(places))


def _products(script: Script, node: ast.expr, scope: Scope, depth: int = 0) -> list[Product]:
    """Return the successive multiplications by the world size that lead to a value."""
    if depth > 8:
        return []
    match node:
        case ast.BinOp(left, op, right):
            by_world = isinstance(op, ast.Mult) and any(
                script.is_kind(side, scope, "world") for side in (left, right)
            )
            rest = [
                product
                for side in (left, right)
                if not script.is_kind(side, scope, "world")
                for product in _products(script, side, scope, depth + 1)
            ]
            return [*rest, (node, scope)] if by_world else rest
        case ast.Name() | ast.Attribute():
            ways: list[list[Product]] = [[]]
            for one in script.reaching(node, scope):
                if one.how in ("parameter", "assign", "augmented"):
                    ways += [_products(script, *v, depth + 1) for v in script.sources(one)]
            return max(ways, key=len)
    return []
