"""T01: Every rank sees all the data."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="T01",
    title="Every rank sees all the data",
    symptom="No message. An epoch takes as long as on one device, and every sample is used once per rank.",
    cause="The DataLoader has no DistributedSampler, so each rank goes through the whole data set.",
    fix="Pass `sampler=DistributedSampler(data)`.",
    wrong="""\
loader = DataLoader(data, batch_size=32, shuffle=True)
""",
    right="""\
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=32, sampler=sampler)
""",
    sources=(
        "Lightning-AI/pytorch-lightning#91",
        "Lightning-AI/pytorch-lightning#81",
        "huggingface/datasets#5360",
    ),
)
