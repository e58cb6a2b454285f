"""Find out whether a model reads values between a group's columns and its row.

    if self.up(x).mean() > 0: …      each shard has a different mean, so it may take another branch

The read comes before the branch, so a pass that takes the common branch shows it too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paralab.workload.batch import tensors
from paralab.workload.linear_layers import Call
from paralab.workload.randomness import seed_everything
from paralab.workload.state import restored

READS = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__),
    *(Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.equal, Tensor.allclose),
    *(torch.equal, torch.allclose, torch.is_nonzero),
}


class SplitValues(TorchFunctionMode):
    """Follows the tensors that are computed from split ones, and notes reads of their values."""

    def __init__(self) -> None:
        super().__init__()
        # Address -> tensor. Storing the tensor prevents reuse of its address.
        self.split: dict[int, Tensor] = {}
        self.read = False

    def add(self, values: Any) -> None:
        self.split |= {_address(each): each for each in tensors(values)}

    def remove(self, values: Any) -> None:
        for each in tensors(values):
            self.split.pop(_address(each), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(_address(each) in self.split for each in tensors((args, kwargs or {}))):
            self.read = self.read or func in READS
            self.add((result, args[:1] if func is Tensor.__setitem__ else ()))
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def reads_values(block: nn.Module, calls: Sequence[Call], columns: Iterable[str], row: str) -> bool:
    """Call the block. Return whether it reads values after these column layers and before the row."""
    values = SplitValues()
    with ExitStack() as around:
        around.enter_context(restored(block))
        hooks = [
            *(block.get_submodule(n).register_forward_hook(_then(values.add)) for n in columns),
            block.get_submodule(row).register_forward_hook(_then(values.remove)),
        ]
        for hook in hooks:
            around.callback(hook.remove)
        for call in calls:
            args, kwargs = copy.deepcopy(call.arguments)
            seed_everything(0)
            with values:
                block(*args, **kwargs)
    return values.read


def _then(note: Any) -> Any:
    return lambda module, args, output: note(output)
