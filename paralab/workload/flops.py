"""Count FLOPs with torch's counter, even if a forward pass calls `torch.autograd.grad`."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import FlopCounterMode


class FlopCounter(FlopCounterMode):
    """torch's counter without its module tracking, whose backward hooks fail if a forward pass
    calls `autograd.grad` (for a gradient penalty, or for forces from an energy)."""

    def __init__(self) -> None:
        super().__init__(display=False)
        modules: Any = _NoModules()
        self.mod_tracker = modules


class _NoModules:
    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...
