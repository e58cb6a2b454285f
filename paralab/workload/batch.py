"""A batch: a tree of tensors in tuples, lists, mappings, and dataclasses. Dim 0 is for samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from paralab.errors import UsageError


def map_tree(leaf: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """Replace each leaf in the tree. Containers keep their types, even those of other libraries."""
    if is_leaf(tree):
        return leaf(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a namedtuple
        return type(tree)(*(map_tree(leaf, item, is_leaf) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)([map_tree(leaf, item, is_leaf) for item in tree])
    if isinstance(tree, Mapping):
        mapped = {key: map_tree(leaf, item, is_leaf) for key, item in tree.items()}
        if type(tree) is dict:
            return mapped
        # Dicts with attributes, such as outputs from other libraries, are created from keyword
        # arguments. Other mappings are created from a dict.
        kind: Any = type(tree)
        return kind(**mapped) if isinstance(tree, dict) else kind(mapped)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        return dataclasses.replace(
            tree, **{name: map_tree(leaf, value, is_leaf) for name, value in values.items()}
        )
    return tree


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Replace each tensor in the tree with function(tensor)."""
    return map_tree(function, tree, lambda item: isinstance(item, torch.Tensor))


def copied(tree: Any) -> Any:
    """Copy all tensors. A trial needs copies, because a model may change its inputs in place."""
    return map_tensors(torch.clone, tree)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield each tensor in the tree, in the same order as `map_tensors`."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors(getattr(tree, field.name))


def num_samples(batch: Any) -> int:
    """Return the length of dim 0, which all tensors in a batch share."""
    lengths = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors(batch)}
    if not lengths:
        problem = f"The data contains no tensors: a batch is a {type(batch).__name__}."
        raise UsageError(problem, fix="tensors whose dim 0 is the sample dim, such as (x, y)")
    if all(tensor.ndim and not len(tensor) for tensor in tensors(batch)):
        raise UsageError("The data has no samples.", fix="at least one sample")
    if len(lengths) != 1 or 0 in lengths:
        shapes = [str(tuple(tensor.shape)) for tensor in tensors(batch)]
        listed = ", ".join(shapes[:6]) + (", …" if len(shapes) > 6 else "")
        raise UsageError(
            f"The tensors in a batch have different lengths in dim 0: {listed}.",
            fix="make dim 0 the sample dim in every tensor",
        )
    return lengths.pop()


def take(batch: Any, start: int, stop: int) -> Any:
    """Return the samples from `start` to `stop`. Lists with one entry per sample are sliced too.

    Parts of a batch are in use at the same time. If a model changes one in place, autograd must not
    believe that the others have changed, as it does for views of one tensor."""

    def cut(item: Any) -> Any:
        part = item[start:stop]
        return part.data if isinstance(part, torch.Tensor) and not part.requires_grad else part

    return map_tree(cut, batch, _per_sample(num_samples(batch)))


def pick(data: Any, choices: Iterable[torch.Tensor]) -> Iterator[Any]:
    """For each tensor of indices, yield the samples with these indices, in this order."""

    def pick_from(indices: torch.Tensor, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item[indices]
        return type(item)(item[index] for index in indices.tolist())

    is_leaf = _per_sample(num_samples(data))
    for indices in choices:
        yield map_tree(partial(pick_from, indices), data, is_leaf)


def resize(batch: Any, samples: int) -> Any:
    """Return the batch with this many samples. Repeat its last sample or drop samples as needed."""
    size = num_samples(batch)
    if size >= samples:
        return batch if size == samples else take(batch, 0, samples)

    def longer(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return torch.cat([item, item[-1:].expand(samples - size, *item.shape[1:])])
        return item + item[-1:] * (samples - size)

    return map_tree(longer, batch, _per_sample(size))


def _per_sample(samples: int) -> Callable[[Any], bool]:
    """Return a function that recognizes leaves: tensors, and plain lists with one entry per
    sample."""
    lists: dict[int, bool] = {}  # keyed by id, because a list may have a million entries

    def is_leaf(item: Any) -> bool:
        if not isinstance(item, list | tuple):
            return isinstance(item, torch.Tensor)
        if id(item) not in lists:
            lists[id(item)] = len(item) == samples and next(tensors(item), None) is None
        return lists[id(item)]

    return is_leaf


def unpack(batch: Any) -> tuple[Any, Any]:
    """Split a batch in one of the common formats into input and target."""
    if isinstance(batch, torch.Tensor):
        return batch, batch
    if isinstance(batch, Mapping) and {"input", "target"} <= batch.keys():
        return batch["input"], batch["target"]
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    kind = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        kind = f"a dict with {list(batch)}"
    elif isinstance(batch, list | tuple):
        kind += f" of {len(batch)}"
    raise UsageError(
        f"A batch is {kind}. It is not clear which part of a batch is the input and which is the "
        "target.",
        fix="unpack=lambda batch: (input, target) in the workload, or batches as (input, target) "
        'or {"input": ..., "target": ...}',
    )


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call model(*inputs) for a tuple, model(**inputs) for a dict, and model(inputs) otherwise."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)
