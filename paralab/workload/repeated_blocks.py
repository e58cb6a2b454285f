"""Find repeated blocks, and try which of them can be recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from paralab.workload.hooks import watched
from paralab.workload.recompute import MODES, python_random_state, recompute
from paralab.workload.state import State, changes
from paralab.workload.summary import Block

# Tolerance relative to a gradient's largest value, because threads add in any order.
ROUNDING = {"cpu": 1e-6, "cuda": 1e-4}


class StepResult(NamedTuple):
    """The result of one training step."""

    gradients: dict[str, torch.Tensor]
    state: State


def find_blocks(model: nn.Module, train: Callable[[], StepResult]) -> tuple[Block, ...]:
    """Find the blocks. Every call to `train` runs the same training step."""
    names = repeated_blocks(model)
    if not names:
        return ()
    works = {mode: blocks_that_recompute(model, names, mode, train) for mode in MODES}
    draw = _blocks_that_draw(model, names, train)
    return tuple(
        Block(name, tuple(mode for mode in MODES if name in works[mode]), name in draw)
        for name in names
    )


def _blocks_that_draw(
    model: nn.Module, names: list[str], train: Callable[[], StepResult]
) -> set[str]:
    """Return the blocks that draw from the generators of Python or numpy."""
    before: dict[str, Any] = {}
    draw: set[str] = set()

    def leave(name: str, _: Any) -> None:
        if name in before and before.pop(name) != python_random_state():
            draw.add(name)

    def enter(name: str, _: Any) -> None:
        if name in names:
            before[name] = python_random_state()

    with watched(model, enter, leave):
        train()
    return draw


def repeated_blocks(model: nn.Module) -> list[str]:
    """Find submodules that look like one of their siblings. A block has submodules and is not
    inside another block.

        GPT(embedding, blocks = ModuleList(b0, b1, … b11), norm, head)      blocks.0 … blocks.11
    """
    blocks: list[str] = []

    def search(parent: nn.Module, prefix: str) -> None:
        children = [(prefix + name, child) for name, child in parent.named_children()]
        looks = [_look(child) for _, child in children]
        for (name, child), look in zip(children, looks, strict=True):
            has_parts = any(True for _ in child.children())
            if has_parts and look[1] and looks.count(look) > 1:
                blocks.append(name)
            else:
                search(child, f"{name}.")

    search(model, "")
    return blocks


def _look(module: nn.Module) -> tuple[type, tuple[Any, ...]]:
    """Return a module's class, and the names and shapes of its parameters."""
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), shapes


def blocks_that_recompute(
    model: nn.Module, names: list[str], mode: str, train: Callable[[], StepResult]
) -> list[str]:
    """Return the blocks whose recomputation gives the same result. Leave out blocks that change
    their state in each call (such as BatchNorm's statistics or a cache) or that change a kept
    tensor in place. Try all blocks together, and only if that fails, one by one."""
    expected = train()

    def works(chosen: list[str]) -> bool:
        computed_again: set[nn.Module] = set()

        def watch(block: nn.Module) -> Any:
            @contextmanager
            def note() -> Iterator[None]:
                computed_again.add(block)
                yield

            return (lambda kept: None), note

        undo = [recompute(model.get_submodule(name), mode, watch) for name in chosen]
        try:
            same = _same(expected, train())
        except Exception:
            return False  # recomputation fails
        finally:
            for each in undo:
                each()
        return same and len(computed_again) == len(chosen)

    return names if works(names) else [name for name in names if works([name])]


def _same(one: StepResult, other: StepResult) -> bool:
    if one.gradients.keys() != other.gradients.keys() or changes(one.state, other.state):
        return False
    return all(
        torch.allclose(
            other.gradients[name],
            gradient,
            rtol=0.0,
            atol=ROUNDING[gradient.device.type] * float(gradient.abs().max())
            if gradient.numel()
            else 0.0,
            equal_nan=True,
        )
        for name, gradient in one.gradients.items()
    )
