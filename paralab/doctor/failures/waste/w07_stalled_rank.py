"""W07: A rank is stuck."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="W07",
    title="A rank is stuck",
    symptom="No step finishes, and no rank reports why.",
    cause="A process is stopped (Ctrl-Z, SIGSTOP, a debugger), waits for a disk, or never leaves a computation.",
    fix="Check its state and its stack. Continue it, or end the job.",
    example="""\
- breakpoint()  # on one rank: all others wait in their next collective
  loss.backward()
""",
)
