"""Observe a model's repeated blocks in a forward pass: the shapes of their tensors, their
attention, and the block whose output each one processes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paralab.plan.sequence_splits import AttentionCall, ObservedBlock
from paralab.workload.batch import call_model, tensors
from paralab.workload.hooks import patched, watched
from paralab.workload.recompute import python_random_state


def observe_blocks(model: nn.Module, inputs: Any, names: Collection[str]) -> list[ObservedBlock]:
    """Return the blocks in the order of their first calls. Turn off dropout before calling this."""
    blocks: dict[str, ObservedBlock] = {}
    inside: list[str] = []
    states: list[Any] = []  # states of the random generators when these blocks began
    calls: dict[str, int] = {}
    # Tensor id -> (block that returned the tensor, number, tensor). Keep the tensor, because
    # otherwise Python may reuse its id.
    returned: dict[int, tuple[str, int, torch.Tensor]] = {}
    attention = nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        if inside:
            heads, key_heads = (t.shape[-3] if t.ndim > 2 else 0 for t in (query, key))
            call = AttentionCall(heads, key_heads, query.shape[-2], key.shape[-2])
            block = blocks[inside[-1]]
            blocks[inside[-1]] = replace(block, attention=(*block.attention, call))
        return attention(query, key, *more, **named)

    def enter(name: str, arguments: Any) -> None:
        if name not in names:
            return
        inside.append(name)
        states.append(_random_state())
        calls[name] = calls.get(name, 0) + 1
        if name in blocks:
            return
        given = list(tensors(arguments))
        sources = {n: returned[id(t)] for n, t in enumerate(given) if id(t) in returned}
        after = next((block for block, _, _ in sources.values()), "")
        blocks[name] = ObservedBlock(
            name,
            tuple(tuple(t.shape) for t in given),
            tuple(t.is_floating_point() for t in given),
            outputs=(),
            attention=(),
            after=after,
            linked=tuple((n, out) for n, (block, out, _) in sources.items() if block == after),
        )

    def leave(name: str, output: Any) -> None:
        if name not in names:
            return
        inside.pop()
        draws = _random_state() != states.pop()
        outputs = list(tensors(output))
        returned.update({id(t): (name, n, t) for n, t in enumerate(outputs)})
        shapes = tuple(tuple(tensor.shape) for tensor in outputs)
        blocks[name] = replace(blocks[name], outputs=shapes, draws=blocks[name].draws or draws)

    with (
        watched(model, enter, leave),
        patched(nn.functional, scaled_dot_product_attention=attend),
    ):
        call_model(model, inputs)
    # For a block that is called several times, the source of its inputs is ambiguous.
    once = {name for name, number in calls.items() if number == 1}
    return [
        block if {block.name, block.after} <= once else replace(block, after="", linked=())
        for block in blocks.values()
    ]


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), *python_random_state()
