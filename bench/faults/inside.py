"""Cause a fault inside a rank. `worker/inject.py` loads this file and calls `inject`.

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
from pathlib import Path
from typing import Any

import torch
from torch import nn

SLOW_SECONDS = 0.3


def plant(mark: Path, **fault: Any) -> dict[str, str]:
    """Return the environment of a run with this fault, such as kind="kill", rank=1, phase="step",
    step=7."""
    request = {"file": str(Path(__file__).resolve()), **fault, "mark": str(mark.resolve())}
    return {"PARALAB_PLANT": json.dumps(request)}


def inject(fault: dict[str, Any], phase: str, rank: int, step: int, model: nn.Module) -> None:
    """Trigger the fault if it is requested for this phase, rank, and step."""
    if (fault["rank"], fault["phase"]) != (rank, phase) or step < fault["step"]:
        return
    mark = Path(fault["mark"])
    if fault["kind"] == "slow":  # sleep in this and every later step
        time.sleep(SLOW_SECONDS)
    if mark.exists():
        return
    mark.write_text(json.dumps({"unix_seconds": time.time(), "step": step}))
    if fault["kind"] == "fill":
        _fill(Path(fault["path"]))
    else:
        FAULTS[fault["kind"]](model)


def _fill(path: Path) -> None:
    """Fill the disk that the file is on."""
    with suppress(OSError), path.open("wb") as file:
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
    "slow": lambda model: None,
}
