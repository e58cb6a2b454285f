"""L11: Shared memory is too small for loader workers.

Symptom: 'DataLoader worker (pid …) is killed by signal: Bus error', or 'unable to allocate shared memory(shm)'.
Cause: Workers pass batches through /dev/shm, and a container has only 64 MB of it by default.
Fix: Start the container with a larger --shm-size or --ipc=host, or use fewer workers.
Limits: The script does not show the size of /dev/shm; logs, runs, and the machine check do.
Reported: pytorch/pytorch#5040 #108861 NVlabs/Deep_Object_Pose#297

- subprocess.run(["docker", "run", "image", "torchrun", "--nproc_per_node=2", "train.py"])
+ subprocess.run(["docker", "run", "--shm-size=8g", "image", "torchrun", "--nproc_per_node=2", "train.py"])
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Findings, Message, check, describe, printed
from paralab.units import size

ENTRY = describe(
    __doc__,
    Message(r"was killed by SIGBUS"),  # paralab's launcher
    printed(
        r"unable to (?:allocate shared memory\(shm\)|(?:write to|resize) file </torch_)|out of shared memory"
        r"|DataLoader worker .{0,40}Bus error",
        "A loader worker on {who} ran out of shared memory{at}. Batches pass through /dev/shm, "
        "and containers get only 64 MB of it by default.",
    ),
    printed(
        r"NCCL WARN .{0,80}No space left on device",
        "NCCL could not create its shared-memory segment: /dev/shm is full. Containers get "
        "only 64 MB of it by default.",
    ),
)


WORKERS, PREFETCHED = 2, 2  # typical numbers per rank and per worker
BATCH_BYTES = 32 * 3 * 224 * 224 * 4  # 32 images as floats


@check("L11", source="machine")
def small_shared_memory(facts: Facts) -> Findings:
    ranks = facts.ranks_here or 2
    needed = ranks * WORKERS * PREFETCHED * BATCH_BYTES
    if facts.shared_bytes is None or facts.shared_bytes >= needed:
        return
    why = (
        f"/dev/shm has {size(facts.shared_bytes)}, but {ranks} ranks × {WORKERS} loader workers × {PREFETCHED} batches of "
        f"{size(BATCH_BYTES)} (32 images) need {size(needed)}. A worker that runs out of shared "
        "memory dies with a bus error."
    )
    evidence, doubt = facts.evidence("shared memory"), "if your own batches need that much"
    yield make_finding("L11", "suspect", why, None, evidence, doubt=doubt)
