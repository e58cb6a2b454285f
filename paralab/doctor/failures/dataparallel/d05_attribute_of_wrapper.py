"""D05: An attribute of the model, asked of the wrapper."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="D05",
    title="An attribute of the model, asked of the wrapper",
    symptom="\"'DataParallel' object has no attribute 'weight'\".",
    cause="The wrapper is another module; the model is its `.module`.",
    fix="`model.module.weight`.",
    wrong="""\
model = nn.DataParallel(net)
print(model.weight.norm())
""",
    right="""\
model = nn.DataParallel(net)
print(model.module.weight.norm())
""",
    messages=(
        Message(
            r"'(?P<wrapper>DataParallel|DistributedDataParallel)' object has no attribute '(?P<name>\w+)'",
            "The script asks the {wrapper} wrapper for `{name}`{at}; only the model inside has it.",
            fix="Use model.module.{name}.",
        ),
    ),
)
