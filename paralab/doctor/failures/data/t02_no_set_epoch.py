"""T02: The same order in every epoch."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="T02",
    title="The same order in every epoch",
    symptom="No message. The samples come in the same order, in the same batches, epoch after epoch.",
    cause="DistributedSampler shuffles by its seed and the epoch, and nobody told it the epoch.",
    fix="`sampler.set_epoch(epoch)` at the start of every epoch.",
    wrong="""\
sampler = DistributedSampler(data)
for epoch in range(10):
    train(loader)
""",
    right="""\
sampler = DistributedSampler(data)
for epoch in range(10):
    sampler.set_epoch(epoch)
    train(loader)
""",
    sources=(
        "pytorch/pytorch#31771",
        "kan-bayashi/ParallelWaveGAN#177",
        "cszn/KAIR#106",
        "Spijkervet/SimCLR#26",
        "facebookresearch/ClassyVision#118",
    ),
    silent=True,
)
