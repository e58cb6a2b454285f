"""M01: No room, or no right to write."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="M01",
    title="No room, or no right to write",
    symptom="A training ends at its first checkpoint: 'No space left on device', 'Permission denied'.",
    cause="The disk is full or belongs to somebody else; many clusters have a quota on the home folder.",
    fix="Save where there is room; TMPDIR for temporary files; delete old checkpoints.",
    wrong="""\
torch.save(model.state_dict(), "/home/me/last.pt")
""",
    right="""\
torch.save(model.state_dict(), os.path.join(os.environ["SCRATCH"], "last.pt"))
""",
)
