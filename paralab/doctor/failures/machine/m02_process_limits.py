"""M02: Process limits are too low.

Symptom: 'Too many open files' from a loader worker; or NCCL does not use InfiniBand.
Cause: Every tensor that a worker passes to training is an open file, and InfiniBand needs locked memory.
Fix: Set `ulimit -n 65536` and `ulimit -l unlimited`. In a container: --ulimit memlock=-1. In Slurm:
PropagateResourceLimitsExcept=MEMLOCK.

+ resource.setrlimit(resource.RLIMIT_NOFILE, (65536, 65536))
  subprocess.run(["torchrun", "--nproc_per_node=8", "train.py"])
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Findings, check, describe
from paralab.units import size

ENTRY = describe(__doc__)
OPEN_FILES = 1024


@check("M02", source="machine")
def low_limits(facts: Facts) -> Findings:
    files, locked = facts.open_files, facts.locked_bytes
    if files is not None and files < OPEN_FILES:
        why = f"A process may open {files} files, and loader workers pass every tensor as an open file."
        evidence, doubt = facts.evidence("open files"), "if a run reports 'Too many open files'"
        yield make_finding("M02", "suspect", why, None, evidence, doubt=doubt)
    if facts.infiniband and locked is not None:
        why = (
            f"A process may lock {size(locked)} of memory, but InfiniBand ({', '.join(facts.infiniband)}) "
            "needs locked buffers, so NCCL fails or does not use it."
        )
        evidence, doubt = facts.evidence("locked memory"), "if NCCL_DEBUG=INFO does not show NET/IB"
        yield make_finding("M02", "suspect", why, None, evidence, doubt=doubt)
