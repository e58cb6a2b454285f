"""Propose which linear layers to shard together, based on which layers read each layer's output.
These are pure functions on plain names and numbers. A proof decides which proposals are used.

    q ─┐                                   columns  q k v    each shard has some heads
    k ─┼─► attention ─► o ─► …             row      o        its results are summed over shards
    v ─┘
    gate ─┐
          ├─► product ─► down ─► …         columns  gate up
    up ───┘                                row      down

A group's columns are all layers that its row reads. No other layer may read them. A chain of layers
a ► b ► c ► d gives the groups a | b and c | d.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from paralab.units import plural
from paralab.workload.tensor_group import LinearLayer, TensorGroup

MOST_ATTEMPTS = 48  # attempts per group
FUSED = (1, 3, 2)  # matrices side by side: none, q k v, and gate up (or k v)
Divided = tuple[tuple[str, int], ...]


def propose(
    layers: Sequence[LinearLayer], called: Iterable[str], tried: Sequence[TensorGroup] = ()
) -> tuple[list[TensorGroup], dict[str, str]]:
    """Return new groups, and the reason why each remaining layer is in no group. `called` has the
    names of the submodules that the forward pass called. `tried` has the earlier groups: if a | b
    was not kept, b | c may be."""
    known, submodules = {layer.name: layer for layer in layers}, set(called)
    readers: dict[str, set[str]] = {name: set() for name in known}
    for layer in layers:
        for name in layer.reads:
            readers[name].add(layer.name)

    groups: list[TensorGroup] = []
    taken = {name for group in tried if group.kept for name in group.layers}
    failed = {group.layers for group in tried if not group.kept}
    left: dict[str, str] = {}
    for row in layers:
        members = (*row.reads, row.name)
        if members in failed:
            continue
        if row.heads and not row.shared and row.name not in taken:
            block = enclosing([row.name], submodules)
            groups.append(TensorGroup(block, (row.name,), row.name, row.parameters - row.inputs))
            taken.add(row.name)
        alone = all(readers[name] == {row.name} for name in row.reads)
        if not row.reads or not alone or row.name in row.reads or not taken.isdisjoint(members):
            continue
        if shared := [name for name in members if known[name].shared]:
            reason = f"{shared[0]} shares its parameters with another module (tied weights)"
            left |= dict.fromkeys(members, reason)
            continue
        taken.update(members)
        split = sum(known[name].parameters for name in row.reads) + row.inputs * row.outputs
        group = TensorGroup(enclosing(members, submodules), row.reads, row.name, split)
        own_style = any(known[name].transposed for name in members)
        groups.append(replace(group, own_style=own_style))

    in_group = taken.union(*failed)
    for name in known:
        if name not in in_group:
            left.setdefault(name, _why_left(name, readers, known))
    return groups, left


def _why_left(name: str, readers: Mapping[str, set[str]], known: Mapping[str, LinearLayer]) -> str:
    if known[name].shared:
        return "it shares its parameters with another module (tied weights)"
    if len(readers[name]) > 1:
        return f"{plural(len(readers[name]), 'linear layer')} read its output"
    if not readers[name]:
        return "no linear layer reads its output"
    [reader] = readers[name]
    return f"{reader} is in another group, or also reads other layers"


def enclosing(names: Sequence[str], called: set[str]) -> str:
    """Return the innermost called submodule that contains all of these, or "" for the model.

    layers.0.attn.q, layers.0.attn.o -> layers.0.attn
    """
    parents = [name.split(".")[:-1] for name in names]
    common = []
    for words in zip(*parents, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    while common and ".".join(common) not in called:
        common.pop()
    return ".".join(common)


def attempts(
    group: TensorGroup, layers: Mapping[str, LinearLayer], attributes: Divided, shards: int
) -> Iterator[TensorGroup]:
    """Yield ways to shard a group, most likely first.

    `attributes` are the integers of the modules around the layers. A module may compute shapes from
    its number of heads or from the width of its projections, so these come first.
    """
    if group.is_attention:
        return iter([] if layers[group.row].heads % shards else [group])
    widths = {layers[name].outputs // parts for name in group.columns for parts in FUSED}
    even = [(name, value) for name, value in attributes if value > 1 and value % shards == 0]
    heads = [each for each in even if _counts_heads(each[0])]
    wide = [each for each in even if each[1] in widths]
    likely = list(dict.fromkeys([*heads, *wide]))
    sets = [[], heads, wide, likely, *([each] for each in likely), *combinations(likely, 2)]
    sets += [[each] for each in even if each not in likely]

    chosen = dict.fromkeys(tuple(sorted((n, v // shards) for n, v in each)) for each in sets)
    possible = [
        replace(group, parts=parts, divided=divided, own_style=own)
        for divided in chosen
        for parts in (FUSED if len(group.columns) == 1 else (1,))
        for own in ((group.own_style,) if divided or group.own_style else (False, True))
        if all(layers[name].outputs % (parts * shards) == 0 for name in group.columns)
    ]
    return iter(possible[:MOST_ATTEMPTS])


def uneven(
    group: TensorGroup, layers: Mapping[str, LinearLayer], attributes: Divided, shards: int
) -> str | None:
    """Return why the group cannot be split evenly, or None."""
    for value in _head_counts(group, layers, attributes):
        if reason := uneven_heads(value, shards):
            return reason
    for name in group.columns:
        if (width := layers[name].outputs) % shards:
            return f"{width} outputs of {name} cannot be split evenly over {shards} shards"
    return None


def uneven_heads(number: int, shards: int) -> str | None:
    """Return why this number of heads cannot be split, or None."""
    if number % shards == 0:
        return None
    possible = ", ".join(str(n) for n in range(2, number + 1) if number % n == 0)
    heads = f"{plural(number, 'head')} cannot be split over {shards} shards"
    return f"{heads}, only over {possible}" if possible else heads


def _head_counts(
    group: TensorGroup, layers: Mapping[str, LinearLayer], attributes: Divided
) -> Iterator[int]:
    """Yield possible numbers of heads: attributes, or widths divided by a head's size."""
    if group.is_attention:
        yield layers[group.row].heads
        return
    widths = [layers[group.row].inputs]
    if len(group.columns) > 1:  # one column layer may have q, k, and v side by side
        widths += [layers[name].outputs for name in group.columns]
    attributes = tuple((name, value) for name, value in attributes if value > 1)
    for name, value in attributes:
        if _counts_heads(name) and widths[0] % value == 0:
            yield value
    for name, value in attributes:
        word = name.rpartition(".")[2]
        if "head" in word and word.endswith(("dim", "size")):
            yield from (width // value for width in widths if width % value == 0)


def _counts_heads(name: str) -> bool:
    """Return whether an attribute's name suggests a number of heads, not their size."""
    word = name.rpartition(".")[2]
    return "head" in word and not any(other in word for other in ("dim", "size", "group"))
