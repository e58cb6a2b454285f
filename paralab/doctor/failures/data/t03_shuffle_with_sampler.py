"""T03: shuffle and sampler together."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="T03",
    title="shuffle and sampler together",
    symptom="'sampler option is mutually exclusive with shuffle'.",
    cause="The sampler decides the order, so the loader must not.",
    fix="Shuffle in the sampler.",
    wrong="""\
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, shuffle=True, sampler=sampler)
""",
    right="""\
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)
""",
    messages=(
        Message(
            r"sampler option is mutually exclusive with shuffle",
            "The DataLoader{at} got shuffle=True and a sampler. The sampler decides the order.",
        ),
    ),
)
