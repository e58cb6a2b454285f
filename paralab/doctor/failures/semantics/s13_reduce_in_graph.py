"""S13: all_reduce of a loss that is still part of the graph."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="S13",
    title="all_reduce of a loss that is still part of the graph",
    symptom="'c10d::allreduce_: an autograd kernel was not registered … may lead to silently incorrect behavior'.",
    cause="The collective overwrites a value that backward still needs, and autograd knows nothing of it.",
    fix="Reduce a copy: `loss.detach().clone()`.",
    wrong="""\
dist.all_reduce(loss)
loss.backward()
""",
    right="""\
shown = loss.detach().clone()
dist.all_reduce(shown)
loss.backward()
""",
    messages=(
        Message(
            r"c10d::(?P<call>\w+?)_?: an autograd kernel was not registered",
            "backward() passes through a collective ({call}): the reduced tensor still belongs to the "
            "graph. What backward computes there is not the derivative of the reduction.",
            kind="printed",
        ),
    ),
)
