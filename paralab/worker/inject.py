"""Inject a fault into this rank when bench/faults requests one through the environment.

PARALAB_PLANT = {"kind": "kill", "rank": 1, "phase": "step", "step": 7, "mark": FILE}

The mark file is written just before the fault and contains the time of the fault. It prevents a
second fault after a restart.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

VARIABLE = "PARALAB_PLANT"
SLOW_SECONDS = 0.3


def inject_fault(phase: str, rank: int, step: int, model: nn.Module) -> None:
    """Trigger the fault requested for this phase, rank, and step, if any."""
    fault = _requested()
    if not fault or (fault["rank"], fault["phase"]) != (rank, phase) or step < fault["step"]:
        return
    mark = Path(fault["mark"])
    if fault["kind"] == "slow":  # for the rest of the run
        time.sleep(SLOW_SECONDS)
    if mark.exists():
        return
    mark.write_text(json.dumps({"unix_seconds": time.time(), "step": step}))
    FAULTS[fault["kind"]](model)


@cache
def _requested() -> dict[str, Any]:
    fault: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
    return fault


def _fill(model: nn.Module) -> None:
    """Fill the disk that the file is on."""
    with suppress(OSError), Path(_requested()["path"]).open("wb") as file:
        while True:
            file.write(bytes(2**20))
            file.flush()


def _raise(model: nn.Module) -> None:
    raise ValueError("a planted error")


def _poison(model: nn.Module) -> None:
    with torch.no_grad():
        next(p for p in model.parameters() if not p.is_meta).fill_(float("nan"))


FAULTS: dict[str, Callable[[nn.Module], Any]] = {
    "kill": lambda model: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda model: ctypes.string_at(0),  # reads address 0
    "exception": _raise,
    "exit0": lambda model: os._exit(0),
    "stop": lambda model: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": lambda model: sum(iter(int, 1)),  # adds zeros forever and never releases the GIL
    "memory": lambda model: torch.empty(2**60),
    "nan": _poison,
    "fill": _fill,
    "slow": lambda model: None,
}
