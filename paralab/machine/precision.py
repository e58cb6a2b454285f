"""Can this CPU train in low precision? Tried in a child process, because it can die of it.

On some virtual machines the CPU lists AMX, the hypervisor forbids it, and the first bf16 matrix
product ends the process with SIGILL. A narrower instruction set for oneDNN avoids that; it must be
set before torch is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field

NARROWER = "AVX512_CORE_FP16"  # without AMX; one value for both precisions, because trainings of both may share a process

TRIAL = """
import sys, torch
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[sys.argv[1]]
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
with torch.autocast("cpu", dtype=dtype):
    loss = model(torch.randn(32, 64)).float().square().mean()
loss.backward()
assert all(torch.isfinite(p.grad).all() for p in model.parameters()), "not finite"
"""


@dataclass(frozen=True)
class Probe:
    """Whether a precision works, with which environment, and what was seen."""

    works: bool
    seen: str
    environment: dict[str, str] = field(default_factory=dict)


def probe_cpu(precision: str, deadline_seconds: float = 60.0) -> Probe:
    """Train a tiny network in a child process in this precision, as it is and then with a narrower
    instruction set."""
    seen = _trial(precision, {}, deadline_seconds)
    if seen is None:
        return Probe(True, f"{precision} trained in a trial process")
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        narrower = {"ONEDNN_MAX_CPU_ISA": NARROWER}
        if _trial(precision, narrower, deadline_seconds) is None:
            why = f"a trial process {seen}; with ONEDNN_MAX_CPU_ISA={NARROWER} it trained"
            return Probe(True, why, narrower)
    return Probe(False, f"a trial process {seen}")


def _trial(precision: str, environment: dict[str, str], deadline_seconds: float) -> str | None:
    """None when it worked, else what happened."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", TRIAL, precision],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=deadline_seconds,
        )
    except subprocess.TimeoutExpired:
        return f"did not finish within {deadline_seconds:.0f} s"
    if done.returncode < 0:
        return f"was killed by {signal.Signals(-done.returncode).name}"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]
