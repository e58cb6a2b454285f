"""M01: The disk is full or not writable.

Symptom: Training stops at its first checkpoint: 'No space left on device', 'Permission denied'.
Cause: The disk is full, or the folder belongs to someone else. Many clusters limit the size of the home folder.
Fix: Save where there is space, set TMPDIR for temporary files, and delete old checkpoints.

- torch.save(model.state_dict(), "/home/me/last.pt")
+ torch.save(model.state_dict(), os.path.join(os.environ["SCRATCH"], "last.pt"))
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Findings, check, describe
from paralab.units import size

ENTRY = describe(__doc__)
ROOM_BYTES = 2**30  # smaller than many checkpoints


@check("M01", source="machine")
def full_disk(facts: Facts) -> Findings:
    for disk in facts.disks:
        evidence = facts.evidence(f"disk {disk.path}")
        if not disk.writable:
            why = f"{disk.path} is not writable, so checkpoints, logs, and rendezvous files cannot go there."
            yield make_finding("M01", "error", why, None, evidence)
        elif disk.free_bytes < ROOM_BYTES:
            why = f"{disk.path} has only {size(disk.free_bytes)} left."
            doubt = "if your checkpoints are larger than that"
            yield make_finding("M01", "suspect", why, None, evidence, doubt=doubt)
