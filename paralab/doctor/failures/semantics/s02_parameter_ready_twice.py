"""S02: One parameter is ready twice."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="S02",
    title="One parameter is ready twice",
    symptom="'Expected to mark a variable ready only once', with the index or the name of a parameter.",
    cause=(
        "Reentrant activation checkpointing, shared weights or a use outside forward runs a parameter's hook "
        "twice in one backward."
    ),
    fix="`use_reentrant=False` in checkpoint(), and no find_unused_parameters with it; or static_graph=True.",
    wrong="""\
model = DistributedDataParallel(model, find_unused_parameters=True)
hidden = checkpoint(block, hidden, use_reentrant=True)
""",
    right="""\
model = DistributedDataParallel(model)
hidden = checkpoint(block, hidden, use_reentrant=False)
""",
    sources=(
        "huggingface/peft#313",
        "huggingface/accelerate#2017",
        "lucidrains/DALLE2-pytorch#225",
        "microsoft/FocalNet#4",
        "pytorch/pytorch#24005",
    ),
    messages=(
        Message(
            r"Expected to mark a variable ready only once"
            r"(?:.*?Parameter at index (?P<index>\d+)(?: with name (?P<name>\S+))? has been marked)?",
            "In one backward pass{at} the gradient of a parameter ({name} {index}) became ready twice. "
            "A reentrant checkpoint runs its part of the graph on its own, or two places share it.",
        ),
    ),
)
