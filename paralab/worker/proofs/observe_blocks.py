"""Observe a model's repeated blocks in a forward pass: the shapes of their tensors, their
attention, and the block whose output each one processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paralab.plan.sequence_splits import AttentionCall, ObservedBlock
from paralab.workload.batch import call_model, copied, tensors
from paralab.workload.hooks import patched, watched
from paralab.workload.recompute import python_random_state


class _Observer:
    """Records what passes through the blocks with these names."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.blocks: dict[str, ObservedBlock] = {}
        self.calls: Counter[str] = Counter()
        self._inside: list[str] = []
        self._states: list[Any] = []  # states of the random generators when these blocks began
        # Tensor id -> (block that returned the tensor, number, tensor). Keep the tensor, because
        # otherwise Python may reuse its id.
        self._returned: dict[int, tuple[str, int, torch.Tensor]] = {}

    def note_attention(self, query: torch.Tensor, key: torch.Tensor) -> None:
        if self._inside:
            heads, key_heads = (t.shape[-3] if t.ndim > 2 else 0 for t in (query, key))
            call = AttentionCall(heads, key_heads, query.shape[-2], key.shape[-2])
            block = self.blocks[self._inside[-1]]
            self.blocks[block.name] = replace(block, attention=(*block.attention, call))

    def enter(self, name: str, arguments: Any) -> None:
        if name not in self.names:
            return
        self._inside.append(name)
        self._states.append(_random_state())
        self.calls[name] += 1
        if name in self.blocks:
            return
        given = list(tensors(arguments))
        sources = {n: self._returned[id(t)] for n, t in enumerate(given) if id(t) in self._returned}
        after = next((block for block, _, _ in sources.values()), "")
        self.blocks[name] = ObservedBlock(
            name,
            tuple(tuple(t.shape) for t in given),
            tuple(t.is_floating_point() for t in given),
            outputs=(),
            attention=(),
            after=after,
            linked=tuple((n, out) for n, (block, out, _) in sources.items() if block == after),
        )

    def leave(self, name: str, output: Any) -> None:
        if name not in self.names:
            return
        self._inside.pop()
        draws = _random_state() != self._states.pop()
        outputs = list(tensors(output))
        self._returned.update({id(t): (name, n, t) for n, t in enumerate(outputs)})
        shapes = tuple(tuple(tensor.shape) for tensor in outputs)
        block = self.blocks[name]
        self.blocks[name] = replace(block, outputs=shapes, draws=block.draws or draws)


def observe_blocks(model: nn.Module, inputs: Any, names: Collection[str]) -> list[ObservedBlock]:
    """Return the blocks in the order of their first calls. Turn off dropout before calling this."""
    observer = _Observer(names)
    attention = nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        observer.note_attention(query, key)
        return attention(query, key, *more, **named)

    with (
        watched(model, observer.enter, observer.leave),
        patched(nn.functional, scaled_dot_product_attention=attend),
    ):
        call_model(model, copied(inputs))
    # For a block that is called several times, the source of its inputs is ambiguous.
    once = {name for name, number in observer.calls.items() if number == 1}
    return [
        block if {block.name, block.after} <= once else replace(block, after="", linked=())
        for block in observer.blocks.values()
    ]


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), *python_random_state()
