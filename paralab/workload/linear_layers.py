"""Observe a model's linear layers in a forward pass: which layers read each layer's output, and the
inputs of submodule calls. Also observe its embeddings.

We trace each call's input back through the autograd graph to the outputs of other linear layers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from paralab.workload.batch import call_model, copied, tensors
from paralab.workload.hooks import watched
from paralab.workload.randomness import seed_everything
from paralab.workload.shard_units import ParameterUse
from paralab.workload.tensor_group import LinearLayer, WordTable

MOST_CALLS = 4  # record at most this many calls of one submodule


class Layers(NamedTuple):
    """The linear layers in the order of their first calls, the embeddings, and all called
    submodules."""

    linear: tuple[LinearLayer, ...]
    tables: tuple[WordTable, ...]
    called: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """Copies of a call's (args, kwargs), and whether each of its tensors requires a gradient."""

    arguments: Any
    trained: list[bool]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies its input by a matrix. `Conv1D` is Hugging Face's name for
    a linear layer with a transposed weight."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an nn.MultiheadAttention whose q, k, and v share one matrix."""
    plain = type(module) is nn.MultiheadAttention and module.in_proj_weight is not None
    return plain and module.bias_k is None and not module.add_zero_attn


def find_layers(model: nn.Module, inputs: Any) -> Layers:
    """Call the model, and describe its linear layers and embeddings."""
    use = ParameterUse(model)
    modules = dict(model.named_modules())
    reads: dict[str, dict[str, None]] = {}
    producers: dict[Any, str] = {}  # the graph node of each output

    def enter(name: str, arguments: Any) -> None:
        use.enter(name, arguments)
        if is_attention(modules[name]):
            reads.setdefault(name, {})
        elif is_linear(modules[name]):
            reads.setdefault(name, {})
            for tensor in tensors(arguments):
                reads[name].update(dict.fromkeys(_producers_of(tensor, producers)))

    def leave(name: str, output: Any) -> None:
        use.leave(name, output)
        if is_linear(modules[name]):
            producers[output.grad_fn] = name

    with watched(model, enter, leave), use:
        call_model(model, copied(inputs))
    order = list(reads)
    layers = tuple(
        _describe(name, modules[name], tuple(sorted(reads[name], key=order.index)), use)
        for name in order
    )
    tables = tuple(
        _describe_table(name, model, use)
        for name in use.calls
        if isinstance(modules[name], nn.Embedding)
    )
    return Layers(layers, tables, tuple(use.calls))


def _describe(name: str, module: Any, reads: tuple[str, ...], use: ParameterUse) -> LinearLayer:
    parameters = sum(parameter.numel() for parameter in module.parameters())
    shared = name in use.used_outside
    if is_attention(module):
        width, heads = module.embed_dim, module.num_heads
        return LinearLayer(name, width, width, parameters, shared=shared, heads=heads)
    outputs, inputs = module.weight.shape
    transposed = not isinstance(module, nn.Linear)
    if transposed:
        outputs, inputs = inputs, outputs
    return LinearLayer(name, inputs, outputs, parameters, reads, shared, transposed)


def _describe_table(name: str, model: nn.Module, use: ParameterUse) -> WordTable:
    table: Any = model.get_submodule(name)
    others = sorted(use.users.get(id(table.weight), set()) - {name})
    heads, tables = (
        tuple(each for each in others if isinstance(model.get_submodule(each), kind))
        for kind in (nn.Linear, nn.Embedding)
    )
    rest = [each or "the model" for each in others if each not in (*heads, *tables)]
    parameters = model.named_parameters(remove_duplicate=False)
    names = [path for path, parameter in parameters if parameter is table.weight]
    problems = {
        "it divides gradients by each word's frequency (scale_grad_by_freq)": (
            table.scale_grad_by_freq
        ),
        "it changes its weight in the forward pass (max_norm)": table.max_norm is not None,
        "its gradients are sparse (sparse=True)": table.sparse,
        f"its weight is also used by {', '.join(rest)}": bool(rest),
    }
    return WordTable(
        name,
        table.num_embeddings,
        table.weight.numel(),
        heads,
        tables,
        tuple(path for path in names if path != f"{name}.weight"),
        next((problem for problem, has in problems.items() if has), ""),
    )


def _producers_of(tensor: torch.Tensor, producers: dict[Any, str]) -> Iterator[str]:
    """Follow the graph back from a tensor to the nearest outputs of linear layers."""
    waiting, visited = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node in producers:
            yield producers[node]
        else:
            waiting.extend(following for following, _ in node.next_functions)


def record_calls(model: nn.Module, inputs: Any, names: Collection[str]) -> dict[str, list[Call]]:
    """Call the model twice and record the first calls of these submodules. A tensor with a graph
    cannot be copied. So the first forward pass records which tensors require gradients, and the
    second, without a graph, copies the arguments."""
    trained: dict[str, list[list[bool]]] = {name: [] for name in names}
    copies: dict[str, list[Any]] = {name: [] for name in names}

    def record(name: str, arguments: Any) -> None:
        if torch.is_grad_enabled():
            trained[name].append([t.requires_grad for t in tensors(arguments)])
        elif len(copies[name]) < MOST_CALLS:
            copies[name].append(copy.deepcopy(arguments))

    with ExitStack() as hooks:
        for name in names:
            hook = model.get_submodule(name).register_forward_pre_hook(
                lambda _, *arguments, name=name: record(name, arguments), with_kwargs=True
            )
            hooks.callback(hook.remove)
        for grad in (True, False):
            seed_everything(0)
            with torch.set_grad_enabled(grad):
                call_model(model, copied(inputs))
    return {name: list(map(Call, copies[name], trained[name])) for name in names}


def integers_around(model: nn.Module, block: str, layers: Collection[str]) -> dict[str, int]:
    """Return the integer attributes of the modules between a block and these layers, by path."""
    modules = dict(model.named_modules())
    integers: dict[str, int] = {}
    for layer in layers:
        path = layer
        while path != block:
            module = modules[path := path.rpartition(".")[0]]
            for key, value in vars(module).items():
                if type(value) is int and not key.startswith("_"):
                    integers[f"{path}.{key}" if path else key] = value
    return integers
