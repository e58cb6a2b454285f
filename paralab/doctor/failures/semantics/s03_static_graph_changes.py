"""S03: static_graph, and the graph changes."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="S03",
    title="static_graph, and the graph changes",
    symptom="'your training graph has changed in this iteration … not compatible with static_graph set to True'.",
    cause="static_graph promises that every step uses the same parameters; a branch on the data breaks the promise.",
    fix="Leave static_graph out, or remove the branch.",
    wrong="""\
model = DistributedDataParallel(model, static_graph=True)
for step, x in enumerate(loader):
    model(x, with_head=step % 2 == 0).sum().backward()
""",
    right="""\
model = DistributedDataParallel(model, find_unused_parameters=True)
for step, x in enumerate(loader):
    model(x, with_head=step % 2 == 0).sum().backward()
""",
    sources=("pytorch/pytorch#97030", "pytorch/pytorch#79171"),
    messages=(
        Message(
            r"training graph has changed in this iteration",
            "{who} took another path through the model than in its first step{at}, although "
            "static_graph=True promises that the graph never changes.",
        ),
    ),
)
