"""Propose which embeddings and heads to split by words. These are pure functions on plain names and
numbers. A proof decides which proposals are used.

    embedding ─► …           row      each shard looks up its words; the results are summed
    … ─► head                column   each shard computes its words' logits; these are gathered
    embedding ─► … ─► head   both     with tied weights, both split the same matrix
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from paralab.plan.tensor_groups import enclosing
from paralab.workload.tensor_group import LinearLayer, TensorGroup, WordTable

SMALL = 0.01  # a smaller share of the model's parameters is not worth a collective


def propose_vocabulary(
    tables: Sequence[WordTable],
    layers: Sequence[LinearLayer],
    left: Mapping[str, str],
    called: Iterable[str],
    parameters: int,
) -> tuple[list[TensorGroup], dict[str, str]]:
    """Return the groups, and the reason why each remaining layer is in no group. `left` has the
    linear layers that are in no group yet."""
    submodules = set(called)
    own = {table.name: table.problem for table in tables}
    problems: dict[str, str] = {}
    for table in tables:  # embeddings with the same weight share their problems
        if problem := next(filter(None, (own[n] for n in (table.name, *table.tables))), ""):
            problems[table.name] = problem
    groups: list[TensorGroup] = []
    usable = [table for table in tables if table.name not in problems]
    for group in [*_tables(usable, layers), *_heads(layers, left)]:
        if group.weights < SMALL * parameters:
            problems |= dict.fromkeys(group.layers, f"it has under {SMALL:.0%} of the parameters")
        else:
            groups.append(replace(group, block=enclosing(group.layers, submodules)))
    split = {name for group in groups for name in group.layers}
    return groups, {n: why for n, why in ({**left, **problems}).items() if n not in split}


def _tables(tables: Iterable[WordTable], layers: Iterable[LinearLayer]) -> Iterator[TensorGroup]:
    sizes = {layer.name: layer.parameters for layer in layers}
    others: set[str] = set()
    for table in tables:
        if table.name not in others:
            others.update(table.tables)
            biases = sum(max(0, sizes[head] - table.parameters) for head in table.heads)
            group = TensorGroup("", table.heads, table.name, table.parameters + biases)
            more = table.tables
            yield replace(group, words=table.words, more_rows=more, tied=table.tied)


def _heads(layers: Sequence[LinearLayer], left: Mapping[str, str]) -> Iterator[TensorGroup]:
    """Yield heads with their own weight: they have more outputs than inputs, and no other layer
    reads their outputs."""
    read = {name for layer in layers for name in layer.reads}
    for layer in layers:
        alone = layer.name in left and layer.name not in read and not layer.shared
        if alone and not layer.transposed and layer.outputs > layer.inputs:
            yield TensorGroup("", (layer.name,), "", layer.parameters, words=layer.outputs)


def uneven_words(group: TensorGroup, shards: int) -> str | None:
    """Return why the words cannot be split evenly, or None."""
    if group.words % shards == 0:
        return None
    even = -(-group.words // shards) * shards
    return f"{group.words} words cannot be split evenly over {shards} shards, but {even} can"
