"""`paralab run --launcher torchrun`: the same command, its ranks started by torch's elastic agent
instead of by us.

This process looks, plans, and becomes `torchrun … paralab run …`, with as many processes as the
plan has ranks; they join.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from paralab.experiment.run import make_plan
from paralab.launch.processes import let_go
from paralab.machine.child import command
from paralab.plan.request import Request


def become_torchrun(request: Request, max_restarts: int) -> NoReturn:
    plan, _, _ = make_plan(request)
    agent = [
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={plan.world_size}",
    ]
    agent += [
        f"--max-restarts={max_restarts}",
        "--no-python",
    ]  # or it would write `python -m`, without -P
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(plan.threads_per_device)
    )  # torchrun would choose 1, and say so at length
    let_go()
    if (
        "SLURM_JOB_ID" in os.environ
    ):  # the ranks hear Slurm's warning themselves; the agent would be ended by it
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.execv(sys.executable, [sys.executable, *agent, *command("paralab", *sys.argv[1:])])
