"""Which loader feeds which training loop, as far as the script shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.static.facts import Call, Loop
from paralab.doctor.static.names import LOADER
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import Way, ways_to

# Frameworks that give each rank its share and set the epoch themselves.
FRAMEWORKS = (
    "accelerate", "pytorch_lightning", "lightning", "lightning_fabric", "composer", "fastai",
    "mmcv", "mmengine", "catalyst", "ray", "determined",
)  # fmt: skip
_EVALUATION = re.compile(r"(^|_)(val|valid\w*|test\w*|eval\w*|dev|query|gallery|infer\w*)(_|\d|$)", re.I)  # fmt: skip


@dataclass(frozen=True)
class Training:
    """A backward pass, the loops around it from the outside in, and the loaders they read."""

    backward: Call
    way: Way
    loops: tuple[tuple[ast.AST, Scope], ...]

    def loop_over(self, script: Script, loader: Call) -> int | None:
        """The position of the loop that reads a loader."""
        for place in reversed(range(len(self.loops))):
            if loader in read_by(script, *self.loops[place]):
                return place
        return None


def trainings(script: Script) -> Iterator[Training]:
    """Every way to a backward pass."""
    for call in script.methods("backward"):
        for way in ways_to(script, call):
            loops = tuple((one.node, each.scope) for each in way.calls for one in each.inside(Loop))
            yield Training(call, way, loops)


def read_by(script: Script, loop: ast.AST, scope: Scope) -> list[Call]:
    """The loaders that a loop reads: in its header, or with `next(…)` in its body."""
    items = [getattr(loop, "iter", None)]
    if not isinstance(loop, ast.comprehension):
        items += [
            node.args[0]
            for node in ast.walk(loop)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "next"
            and node.args
        ]
    return [
        call
        for item in items
        if item is not None
        for call in script.contributors(item, scope)
        if is_loader(script, call)
    ]


def is_loader(script: Script, call: Call) -> bool:
    return call.target == LOADER or (call.made is not None and script.is_a(call.made, "DataLoader"))


def is_for_evaluation(script: Script, call: Call) -> bool:
    """Is what a call makes named like something for validation or testing?"""
    parent: ast.AST | None = call.node
    while parent is not None and not isinstance(parent, ast.stmt):
        parent = call.module.parents.get(parent)
    targets = getattr(parent, "targets", None) or [getattr(parent, "target", None)]
    names = [name for one in targets if one is not None for name in _names(one)]
    data = call.argument(0, "dataset")
    names += _names(data) if data is not None else []
    return any(_EVALUATION.search(name) for name in [*names, call.scope.name])


def _names(node: ast.AST) -> list[str]:
    found = []
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.append(part.id)
        elif isinstance(part, ast.Attribute):
            found.append(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.append(part.value)
    return found
