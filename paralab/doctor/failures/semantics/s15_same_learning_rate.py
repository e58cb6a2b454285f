"""S15: More ranks, same learning rate."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S15",
    title="More ranks, same learning rate",
    symptom="Fewer steps per epoch and slower progress than on one device; or a learning rate that was scaled twice.",
    cause="DDP averages over a batch that is as many times larger as there are ranks, so each epoch has fewer, better steps.",
    fix="Keep the global batch, or adapt the learning rate to it (in proportion, or by the square root), once.",
    wrong="""\
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
optimizer = SGD(model.parameters(), lr=0.1)
""",
    right="""\
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
optimizer = SGD(model.parameters(), lr=0.1 * dist.get_world_size())
""",
    limits="Which rate was meant is not written anywhere: it can be pointed out, never proved.",
)
