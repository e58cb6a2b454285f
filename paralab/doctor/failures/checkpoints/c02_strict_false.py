"""C02: strict=False, and nothing was loaded."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="C02",
    title="strict=False, and nothing was loaded",
    symptom="No message. Training goes on from random weights.",
    cause="All names differ (by the prefix 'module.'), strict=False allows it, and nobody looks at what is returned.",
    fix="Remove the prefix and load strictly, or check the names that load_state_dict returns.",
    wrong="""\
state = torch.load("net.pt", map_location="cpu")
net.load_state_dict(state, strict=False)
""",
    right="""\
state = torch.load("net.pt", map_location="cpu")
net.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
""",
    sources=("pytorch/examples#1029",),
    silent=True,
)
