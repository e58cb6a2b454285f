"""Check whether two NCCL ranks can share a GPU here, in child processes because they may hang."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paralab.machine.precision import Probe

SHARE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # NCCL 2.30 and newer versions read this
RANKS = 2
TRIAL = """
import sys, torch, torch.distributed as dist
dist.init_process_group("nccl", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
tensor = torch.ones(1 << 20, device="cuda:0")
dist.all_reduce(tensor)
assert tensor.max().item() == 2, "wrong sum"
"""


def probe_nccl_sharing(deadline_seconds: float = 60.0) -> Probe:
    """Run an all-reduce between two processes on the first GPU."""
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        command = [sys.executable, "-P", "-c", TRIAL, str(Path(folder, "store"))]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                env={**os.environ, **SHARE},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        deadline = time.monotonic() + deadline_seconds
        try:
            for rank in ranks:
                _, printed = rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
                if rank.returncode:
                    return Probe(False, (printed.strip().splitlines() or ["it crashed"])[-1])
        except subprocess.TimeoutExpired:
            return Probe(False, f"no answer within {deadline_seconds:.0f} s")
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    return Probe(True, "two ranks shared a GPU in a trial")
