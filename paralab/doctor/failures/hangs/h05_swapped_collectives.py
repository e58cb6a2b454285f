"""H05: Two alike collectives swapped between ranks: wrong numbers, no error."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="H05",
    title="Two alike collectives swapped between ranks: wrong numbers, no error",
    symptom="Nothing is reported. Two reduced values are mixtures of each other: the loss holds a part of the accuracy.",
    cause="Same operation and same shape, called in another order on some ranks. They are paired by number, so nobody notices.",
    fix="Reduce in one order everywhere, or pack the values into one tensor and reduce that.",
    wrong="""\
if dist.get_rank() == 0:
    dist.all_reduce(loss)
    dist.all_reduce(accuracy)
else:
    dist.all_reduce(accuracy)
    dist.all_reduce(loss)
""",
    right="""\
both = torch.stack([loss, accuracy])
dist.all_reduce(both)
loss, accuracy = both
""",
    sources=("alan-turing-institute/autocast#386",),
    silent=True,
)
