"""A batch is a tree of tensors: a tensor, or a tuple, list or dict of trees, with the samples along the first axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from paralab.errors import UsageError


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with every tensor replaced by function(tensor); anything else is kept."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a namedtuple is built from separate arguments
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)([map_tensors(function, item) for item in tree])
    if isinstance(tree, dict):
        mapped = {key: map_tensors(function, item) for key, item in tree.items()}
        # Output classes of other libraries are dicts with attributes: rebuild them as what they are.
        return mapped if type(tree) is dict else type(tree)(**mapped)
    return tree


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor of the tree, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors(item)


def num_samples(batch: Any) -> int:
    """The length of the first axis, which all tensors of a batch share."""
    lengths = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors(batch)}
    if len(lengths) != 1 or 0 in lengths:
        shapes = [tuple(tensor.shape) for tensor in tensors(batch)]
        raise UsageError(
            f"The tensors of a batch do not share one number of samples along their first axis: shapes {shapes}.",
            cure="put the samples along the first axis of every tensor of the batch",
        )
    return lengths.pop()


def take(batch: Any, start: int, stop: int) -> Any:
    """Samples start … stop of a batch."""
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def unpack(batch: Any) -> tuple[Any, Any]:
    """(input, target) of a batch, for the usual shapes."""
    if isinstance(batch, torch.Tensor):
        return batch, batch
    if isinstance(batch, Mapping) and {"input", "target"} <= batch.keys():
        return batch["input"], batch["target"]
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    found = f"a dict with {list(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    if isinstance(batch, list | tuple):
        found += f" of {len(batch)}"
    raise UsageError(
        f"A batch is {found}; which part is the input and which the target?",
        cure='unpack=lambda batch: (input, target) in the workload, or batches as (input, target) or {"input": ..., "target": ...}',
    )


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """model(x), model(*xs) for a tuple, model(**xs) for a dict."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)
