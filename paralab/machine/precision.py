"""Check whether this CPU can train in low precision. Test this in a child process, because it may
crash.

On some virtual machines, the CPU lists AMX but the hypervisor forbids it, and the first bf16 matrix
product kills the process with SIGILL. Limiting oneDNN to a smaller instruction set avoids the
crash. The limit must be set before importing torch.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field

from paralab.machine.signals import describe_exit

# Excludes AMX. Both precisions use the same value, because one process may train in both.
NARROWER = "AVX512_CORE_FP16"

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
    """The result of a trial: whether a precision works, what happened, and which environment
    variables it needs."""

    works: bool
    reason: str
    environment: dict[str, str] = field(default_factory=dict)


def probe_cpu(precision: str, deadline_seconds: float = 60.0) -> Probe:
    """Train a tiny network in a child process, if necessary with a smaller instruction set."""
    problem = _trial(precision, {}, deadline_seconds)
    if problem is None:
        return Probe(True, f"{precision} trained in a trial process")
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        narrower = {"ONEDNN_MAX_CPU_ISA": NARROWER}
        if _trial(precision, narrower, deadline_seconds) is None:
            why = f"a trial process {problem}; with ONEDNN_MAX_CPU_ISA={NARROWER} it trained"
            return Probe(True, why, narrower)
    return Probe(False, f"a trial process {problem}")


def _trial(precision: str, environment: dict[str, str], deadline_seconds: float) -> str | None:
    """Run the trial. Return None if it worked, otherwise say what happened."""
    command, environment = [sys.executable, "-P", "-c", TRIAL, precision], os.environ | environment
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=deadline_seconds
        )
    except subprocess.TimeoutExpired:
        return f"did not finish within {deadline_seconds:.0f} s"
    if done.returncode < 0:
        return describe_exit(done.returncode)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]
