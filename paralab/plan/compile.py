"""Choose the repeated blocks to compile, and check that this machine can compile."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from paralab.errors import UsageError
from paralab.plan.plan import Reasons
from paralab.plan.recompute import NO_BLOCKS, listed
from paralab.plan.request import Request
from paralab.workload.summary import Summary

NOT_COMPILED = "leave out --compile"  # the fix if torch.compile fails


def choose_compiled(
    request: Request, summary: Summary, device: str, reasons: Reasons
) -> tuple[str, ...]:
    """Return the names of the blocks to compile."""
    if not request.compile:
        return ()
    names = [block.name for block in summary.blocks]
    if not names:
        raise UsageError(
            f"--compile: {summary.name} has {NO_BLOCKS}.",
            fix="leave out --compile, or group the layers into modules that share a class",
        )
    if summary.random or summary.state:
        what = "draws random numbers" if summary.random else "changes its state in each call"
        raise UsageError(
            f"--compile: {summary.name} {what}, which verification must hold fixed. It cannot do "
            "that inside compiled code.",
            fix="leave out --compile",
        )
    _require_compiler(device)
    because = "requested; blocks of one class share their compiled code"
    reasons.add("compile", listed(names), because)
    return tuple(names)


def _require_compiler(device: str) -> None:
    if device == "cuda":
        if find_spec("triton") is None:
            raise UsageError("--compile needs Triton on a GPU.", fix="pip install triton")
        return
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        raise UsageError(
            f"--compile needs a C++ compiler on a CPU, but there is no {compiler!r} on the PATH.",
            fix="apt-get install g++, set CXX to a compiler, or leave out --compile",
        )
