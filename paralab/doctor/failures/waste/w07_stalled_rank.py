"""W07: A rank stands still."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="W07",
    title="A rank stands still",
    symptom="No step is finished any more, and nobody says why.",
    cause="A process is stopped (Ctrl-Z, SIGSTOP, a debugger), waits for a disk, or computes without end.",
    fix="Look at its state and its stack; continue it, or end the job.",
    wrong="""\
breakpoint()  # on one rank: all others wait in their next collective
loss.backward()
""",
    right="""\
loss.backward()
""",
)
