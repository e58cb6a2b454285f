"""W07: A rank is stuck."""

from paralab.doctor.registry import describe

ENTRY = describe(
    __doc__,
    symptom="No step finishes, and no rank reports why.",
    cause="A process is stopped (Ctrl-Z, SIGSTOP, a debugger), is waiting for a disk, or is stuck in a computation.",
    fix="Check the state and the stack of that process. Resume it, or stop the job.",
    example="""\
- breakpoint()  # on one rank: all others wait in their next collective
  loss.backward()
""",
)
