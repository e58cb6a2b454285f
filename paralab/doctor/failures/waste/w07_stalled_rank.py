"""W07: A rank is stuck.

Symptom: No step finishes, and no rank reports why.
Cause: A process is stopped (Ctrl-Z, SIGSTOP, a debugger), is waiting for a disk, or is stuck in a computation.
Fix: Check the state and the stack of that process. Resume it, or stop the job.

- breakpoint()  # on one rank: all others wait in their next collective
  loss.backward()
"""

from paralab.doctor.registry import describe

ENTRY = describe(__doc__)
