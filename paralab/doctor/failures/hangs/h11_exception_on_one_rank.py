"""H11: An exception on one rank, and its echoes on the others."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="H11",
    title="An exception on one rank, and its echoes on the others",
    symptom="One rank has a Python traceback; the others say 'Connection closed by peer' (gloo), or hang (NCCL).",
    cause="A bad sample, a failed assertion or a full GPU on one rank; the other messages only follow from it.",
    fix="Repair the rank whose error came first and is no transport error; `@record` makes torchrun print it.",
    wrong="""\
def main():
    train()


main()
""",
    right="""\
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    train()


main()
""",
)
