"""Sizes that a script contains: rows of a tensor or dataset, batches of a loader."""

from __future__ import annotations

import ast
from typing import cast

from paralab.doctor.static.facts import Call, once_per_node
from paralab.doctor.static.names import LOADER
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import WORLD, Script

_SHAPED = ("randn", "rand", "zeros", "ones", "empty", "arange", "randperm")
_LOOKED_THROUGH = ("enumerate", "tqdm", "iter", "list", "cycle")


def number(script: Script, node: ast.expr | None, scope: Scope) -> int | None:
    value = script.evaluate(node, scope, 0) if node is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@once_per_node(cast("int | None", None))
def rows(script: Script, node: ast.expr, scope: Scope) -> int | None:
    """Return the length of a tensor, a dataset, or a list."""
    if isinstance(node, ast.ListComp):
        return batches(script, node.generators[0].iter, scope)
    makers = script.makers(node, scope)
    if not makers:
        definitions = script.reaching(node, scope)
        values = [value for one in definitions for value in script.sources(one)]
        return rows(script, *values[0]) if len(values) == 1 else None
    call = makers[0]
    last = call.target.rpartition(".")[2]
    if len(makers) > 1 or not call.node.args:
        return None
    if call.target == f"torch.{last}" and last in _SHAPED:
        return number(script, call.node.args[0], call.scope)
    if call.target == "torch.utils.data.TensorDataset":
        return rows(script, call.node.args[0], call.scope)
    return None


@once_per_node(cast("Call | None", None))
def loader_of(script: Script, node: ast.expr, scope: Scope) -> Call | None:
    """Return the one DataLoader that a loop iterates over."""
    makers = script.makers(node, scope)
    if len(makers) != 1:
        return None
    call = makers[0]
    if call.target == LOADER:
        return call
    if call.last_name in _LOOKED_THROUGH and call.node.args:
        return loader_of(script, call.node.args[0], call.scope)
    return None


def batches(script: Script, node: ast.expr, scope: Scope) -> int | None:
    """Return how many items a loop over this value gets: batches of a loader, or elements."""
    call = script.call_at.get(node)
    if call is not None and call.last_name in _LOOKED_THROUGH and call.node.args:
        return batches(script, call.node.args[0], scope)
    if call is not None and call.target == "builtins.range" and len(call.node.args) == 1:
        return number(script, call.node.args[0], scope)
    loader = loader_of(script, node, scope)
    if loader is None:
        return rows(script, node, scope)
    samples, size = samples_of(script, loader), batch_size(script, loader)
    if samples is None or size is None:
        return None
    return samples // size if drops_last(script, loader) else -(-samples // size)


def samples_of(script: Script, loader: Call) -> int | None:
    """Return the number of samples that one rank gets from a loader."""
    samples = rows(script, loader.argument(0, "dataset"), loader.scope)
    sampler = loader.argument(3, "sampler")
    if samples is None or loader.argument(4, "batch_sampler") is not None or loader.unpacks:
        return None
    if script.is_kind(sampler, loader.scope, "distributed sampler"):
        return -(-samples // WORLD)
    return samples


def batch_size(script: Script, loader: Call) -> int | None:
    given = loader.argument(1, "batch_size")
    if given is None:
        return None if loader.unpacks or loader.argument(4, "batch_sampler") is not None else 1
    return number(script, given, loader.scope) or None


def drops_last(script: Script, loader: Call) -> bool:
    given = loader.argument(8, "drop_last")
    return given is not None and script.truth(given, loader.scope, 0) is not False
