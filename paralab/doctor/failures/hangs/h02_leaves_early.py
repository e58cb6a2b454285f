"""H02: One rank leaves early, with exit code 0."""

from paralab.doctor.registry import Message, describe

ENTRY = describe(
    __doc__,
    symptom="The other ranks die with 'Connection closed by peer'. The rank that left prints nothing.",
    cause="Only one rank reaches a `return` or `sys.exit(0)`, while the others still call collectives.",
    fix="Make all ranks exit at the same place. If one rank decides, broadcast its decision.",
    example="""\
- if dist.get_rank() == 0 and os.path.exists("done"):
+ done = torch.tensor(os.path.exists("done"), dtype=torch.int)
+ dist.broadcast(done, src=0)
+ if done:
      sys.exit(0)
  train(model, loader)
""",
    sources="pytorch/pytorch#122358",
    messages=(
        Message(r"with code 0 (?:before|without)"),  # paralab's launcher
    ),
)
