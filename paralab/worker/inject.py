"""Let bench/faults inject a fault into this rank, to test whether training survives it.

PARALAB_PLANT = {"file": "…/bench/faults/inside.py", …}      passed to the file's `inject`
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from functools import cache, partial

from torch import nn


def inject_fault(phase: str, rank: int, step: int, model: nn.Module) -> None:
    if inject := _load():
        inject(phase, rank, step, model)


@cache
def _load() -> Callable[[str, int, int, nn.Module], None] | None:
    fault = json.loads(os.environ.get("PARALAB_PLANT", "{}"))
    return partial(runpy.run_path(fault["file"])["inject"], fault) if fault else None
