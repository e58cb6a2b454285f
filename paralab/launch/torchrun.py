"""`paralab run --launcher torchrun`: torch's elastic agent starts the ranks.

This process becomes `torchrun … paralab run …` with one process per rank. Those processes use the
launcher in `joined_ranks.py`.
"""

import os
import signal
import sys
from typing import NoReturn

from paralab.launch.processes import end_template
from paralab.machine.child import command
from paralab.plan.plan import Plan


def become_torchrun(plan: Plan, max_restarts: int) -> NoReturn:
    agent = ["-P", "-m", "torch.distributed.run", "--standalone"]
    agent += [f"--nproc-per-node={plan.world_size}", f"--max-restarts={max_restarts}"]
    agent += ["--no-python"]  # otherwise torchrun runs `python -m` without -P
    # If this is not set, torchrun uses 1 thread and prints a long warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(plan.threads_per_device))
    end_template()
    # The launched processes handle Slurm's warning signal, but it would kill torchrun's agent.
    if "SLURM_JOB_ID" in os.environ:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.execv(sys.executable, [sys.executable, *agent, *command("paralab", *sys.argv[1:])])
