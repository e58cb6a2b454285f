"""Guess from names and nesting where values are unknown. A guess is enough for a suspect, but
never for an error or a warning."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.imports import search_path
from paralab.doctor.static.names import meaning
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script, once_per_script

# Words that show what a project does, no matter which file contains them.
_WORDS = (
    "set_epoch", "set_device", "set_default_device", "init_process_group", "DistributedDataParallel",
    "DistributedSampler", "FullyShardedDataParallel", "Accelerator", "CUDA_VISIBLE_DEVICES",
    "pytorch_lightning", "deepspeed",
)  # fmt: skip
_SEED_OF_RANK = re.compile(r"\b(?:seed[^\n]{0,40}rank|rank[^\n]{0,40}seed)\b")
_PARALLEL = frozenset(
    "init_process_group DistributedDataParallel FullyShardedDataParallel Accelerator".split()
) | {"pytorch_lightning", "deepspeed"}
_TRAINS = re.compile(
    r"^backward$|train(_\w*)?(epoch|step|batch|loop)|(run|fit)_(epoch|step)|optimi[sz]e", re.I
)
_LEFT_OUT = frozenset(("node_modules", "site-packages", "build", "dist", "venv", "env"))
MOST_FILES = 1000


@once_per_script
def words_of_project(script: Script) -> frozenset[str]:
    """Return the relevant words that occur in any file of the project."""
    here = {word for module in script.modules for word in _words_in(module.text)}
    root = min(search_path(script.path), key=lambda folder: len(folder.parts))
    return _words_below(root) | here


def _words_in(text: str) -> set[str]:
    found = {word for word in _WORDS if word in text}  # ten times as fast as a pattern
    return found.union(_SEED_OF_RANK.findall(text) if "seed" in text and "rank" in text else ())


@cache
def _words_below(root: Path) -> frozenset[str]:
    words: set[str] = set()
    count = 0
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            one for one in folders if one not in _LEFT_OUT and not one.startswith(".")
        )
        for name in files:
            path = os.path.join(folder, name)
            if name.endswith(".py") and count < MOST_FILES and os.path.isfile(path):  # not a pipe
                count += 1
                try:
                    with open(path, encoding="utf-8", errors="replace") as stream:
                        words.update(_words_in(stream.read()))
                except OSError:
                    continue
        if count >= MOST_FILES:
            break
    return frozenset(words)


def is_parallel(script: Script) -> bool:
    """Return whether the project starts ranks or wraps a model for them."""
    return not _PARALLEL.isdisjoint(words_of_project(script))


def trains(script: Script) -> bool:
    """Return whether these modules contain the training loop, so that no other code affects the
    result."""
    return bool(script.methods("backward"))


def is_in_training(script: Script, scope: Scope) -> bool:
    """Return whether a function trains or calls one that does: `backward`, `train_one_epoch`."""
    named = any(_TRAINS.search(call.method) for call in script.calls_in(scope))
    return named or any(call.method == "backward" for call in script.reached(scope))


def is_for_one_rank(test: ast.expr, taken: bool = True) -> bool:
    """Return whether a condition's names suggest that only one rank passes it: `is_main_process()`,
    `args.local_rank in (-1, 0)`."""
    match test:
        case ast.BoolOp(ast.And(), values) if taken:
            return any(is_for_one_rank(value) for value in values)
        case ast.BoolOp(ast.Or(), values) if not taken:
            return any(is_for_one_rank(value, False) for value in values)
        case ast.UnaryOp(ast.Not(), operand):
            return is_for_one_rank(operand, not taken)
        case ast.Compare(left, [ast.Eq() | ast.In()], [right]):
            return taken and _means(left, "rank") and _is_first(right)
        case ast.Compare(left, [ast.NotEq() | ast.Gt() | ast.NotIn()], [right]):
            return not taken and _means(left, "rank") and _is_first(right)
    return taken and _means(test, "main")


def is_for_others(test: ast.expr, taken: bool = True) -> bool:
    """Return whether names suggest that all ranks but one pass a condition: `not is_master()`."""
    match test:
        case ast.BoolOp(ast.And(), values) if taken:
            return any(is_for_others(value) for value in values)
    return is_for_one_rank(test, not taken)


def _is_first(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(_is_first(one) for one in node.elts)
    return isinstance(node, ast.Constant) and node.value == 0


def _means(node: ast.expr, kind: str) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    name = getattr(node, "attr", None) or getattr(node, "id", "")
    return meaning(str(name).removeprefix("get_")) == kind


def guards(script: Script, call: Call, depth: int = 3) -> Iterator[ast.expr]:
    """Yield the conditions for reaching a call, including those of its known callers."""
    yield from (one.test for one in call.inside(If))
    scope: Scope | None = call.scope
    while scope is not None:
        yield from getattr(scope.node, "decorator_list", [])
        for caller in script.callers(scope) if scope.is_function and depth else []:
            yield from guards(script, caller, depth - 1)
        scope = scope.parent
