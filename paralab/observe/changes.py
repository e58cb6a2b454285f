"""Changes to a model after wrapping, which DDP does not notice: parameters frozen or unfrozen, the
model moved or cast."""

from typing import Any

import torch
from torch import nn

from paralab.observe.rank import Fields, Rank
from paralab.observe.wrappers import is_inside, wrap


class Changes:
    """`numbers` and `names` come from `Models` and identify wrapped modules and parameters."""

    def __init__(self, rank: Rank, numbers: dict[int, int], names: dict[int, str]) -> None:
        self.rank, self.numbers, self.names = rank, numbers, names
        self.on = False

    def watch(self) -> None:
        """Start when the first model is wrapped. Earlier changes do not matter."""
        if self.on:
            return
        self.on = True
        base: Any = torch._C.TensorBase
        reads, writes = base.requires_grad.__get__, base.requires_grad.__set__
        calls = base.requires_grad_

        def set_(parameter: Any, trainable: bool) -> None:
            self._note(parameter, reads(parameter), trainable)
            writes(parameter, trainable)

        def requires_grad_(parameter: Any, requires_grad: bool = True) -> Any:
            self._note(parameter, reads(parameter), requires_grad)
            return calls(parameter, requires_grad)

        nn.Parameter.requires_grad = property(reads, set_)  # type: ignore[assignment]
        nn.Parameter.requires_grad_ = requires_grad_  # type: ignore[assignment, method-assign]
        wrap(self.rank, nn.Module, "_apply", "moved", self._moving, self._describe_move)

    def _note(self, parameter: Any, before: bool, after: bool) -> None:
        if before == after or not self.rank.on or torch.compiler.is_compiling():
            return
        try:
            if id(parameter) in self.names:
                self.rank.emit("trainable", name=self.names[id(parameter)], trainable=bool(after))
        except Exception as error:
            self.rank.switch_off(error)

    def _moving(self, module: nn.Module, *args: Any, **kwargs: Any) -> Fields | None:
        if id(module) not in self.numbers or is_inside(self.rank, "moved"):
            return None
        return {"model": self.numbers[id(module)], "before": _where(module)}

    def _describe_move(self, result: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Fields:
        return {"after": _where(module)}


def _where(module: nn.Module) -> str:
    first = next(module.parameters(), None)
    return "" if first is None else f"{first.device} {str(first.dtype).removeprefix('torch.')}"
