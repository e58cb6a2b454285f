"""H02: One rank leaves early, with exit code 0.

Symptom: The other ranks die with 'Connection closed by peer'. The rank that left prints nothing.
Cause: Only one rank reaches a `return` or `sys.exit(0)`, while the others still call collectives.
Fix: Make all ranks exit at the same place. If one rank decides, broadcast its decision.
Reported: pytorch/pytorch#122358

- if dist.get_rank() == 0 and os.path.exists("done"):
+ done = torch.tensor(os.path.exists("done"), dtype=torch.int)
+ dist.broadcast(done, src=0)
+ if done:
      sys.exit(0)
  train(model, loader)
"""

from paralab.doctor.registry import Message, describe

ENTRY = describe(
    __doc__,
    Message(r"with code 0 (?:before|without)"),  # paralab's launcher
)
