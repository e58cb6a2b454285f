"""Recognize gradient accumulation by names, which is enough only for a suspect."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paralab.doctor.static.facts import Call, If, Loop
from paralab.doctor.static.script import Script

# Frameworks that divide the loss or decide when gradients are synchronized.
SYNCHRONIZERS = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "lightning_fabric", "composer", "ignite")  # fmt: skip
_ACCUMULATION = r"accum|grad_acc|update_freq|update_period|iter_size|optimizer_period"
_DIVIDES = re.compile(rf"/=?[^\n,=]*({_ACCUMULATION})|\.(div|mul)_?\([^\n]*({_ACCUMULATION})", re.I)


def accumulations(script: Script) -> Iterator[tuple[Call, Call]]:
    """Yield a backward pass and its step, `if i % accumulation_steps == 0: optimizer.step()`."""
    for step in script.methods("step"):
        if not script.is_kind(step.receiver, step.scope, "optimizer", "scaler"):
            continue
        tests = [one.test for one in step.inside(If)]
        parts = [part for test in tests for part in ast.walk(test)]
        names = [part for part in parts if isinstance(part, (ast.Name, ast.Attribute))]
        for name in names:
            tests += [one.value for one in script.reaching(name, step.scope) if one.value]
        if any(_counts_accumulation(test) for test in tests):
            owner = step.scope.class_around
            near = script.calls_in(step.scope) + (script.calls_in_class(owner) if owner else [])
            passes = [call for call in near if call.method == "backward"]
            yield from ((call, step) for call in passes[:1])
            continue
        around = step.inside(Loop)
        for call in script.calls_in(step.scope):  # `for _ in range(accumulation_steps): …`
            loops = [one.node for one in call.inside(Loop) if one not in around]
            items = [ast.unparse(one.iter) for one in loops if isinstance(one, ast.For)]
            if call.method == "backward" and re.search(_ACCUMULATION, " ".join(items), re.I):
                yield call, step
                break


def _counts_accumulation(test: ast.AST) -> bool:
    """Return whether a condition is like `(i + 1) % args.accumulation_steps == 0`."""
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Mod)
        and re.search(_ACCUMULATION, ast.unparse(part.right), re.I)
        for part in ast.walk(test)
    )


def divides_by_accumulation(script: Script) -> bool:
    return any(_DIVIDES.search(module.text) for module in script.modules)
