"""M01: No space, or no permission to write."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.preflight import Facts
from paralab.doctor.registry import Entry, check
from paralab.units import size

ENTRY = Entry(
    id="M01",
    title="No space, or no permission to write",
    symptom="Training ends at its first checkpoint: 'No space left on device', 'Permission denied'.",
    cause="The disk is full or belongs to someone else. Many clusters have a quota on the home folder.",
    fix="Save where there is space, set TMPDIR for temporary files, and delete old checkpoints.",
    example="""\
- torch.save(model.state_dict(), "/home/me/last.pt")
+ torch.save(model.state_dict(), os.path.join(os.environ["SCRATCH"], "last.pt"))
""",
)
ROOM_BYTES = 2**30  # smaller than many checkpoints


@check("M01", source="machine")
def full_disk(facts: Facts) -> Iterator[Finding]:
    """Report folders that cannot be written, and suspect those with little space."""
    for disk in facts.disks:
        evidence = facts.evidence(f"disk {disk.path}")
        if not disk.writable:
            why = f"{disk.path} is not writable: there is no place for checkpoints, logs, and rendezvous files."
            fix = "Use another folder; set TMPDIR for temporary files."
            yield Finding("M01", "error", why, fix, evidence=evidence)
        elif disk.free_bytes < ROOM_BYTES:
            why = f"{disk.path} has {size(disk.free_bytes)} left. Certain if your checkpoints are larger than that."
            yield Finding(
                "M01", "suspect", why, "Free some space, or save elsewhere.", evidence=evidence
            )
