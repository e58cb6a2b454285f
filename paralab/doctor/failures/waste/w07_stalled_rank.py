"""W07: A rank is stuck."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="W07",
    title="A rank is stuck",
    symptom="No step finishes, and no rank reports why.",
    cause="A process is stopped (Ctrl-Z, SIGSTOP, a debugger), is waiting for a disk, or is stuck in a computation.",
    fix="Check its state and its stack. Resume it, or end the job.",
    example="""\
- breakpoint()  # on one rank: all others wait in their next collective
  loss.backward()
""",
)
