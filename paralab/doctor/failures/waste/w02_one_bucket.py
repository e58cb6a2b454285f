"""W02: One bucket: nothing overlaps."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="W02",
    title="One bucket: nothing overlaps",
    symptom="The gradients are sent after the backward pass, not during it.",
    cause="DDP sends a bucket when all its gradients are there. One that holds the whole model is full at the very end.",
    fix="Smaller buckets: about four of them.",
    wrong="""\
model = DistributedDataParallel(model)  # 24 MB of gradients, buckets of 25 MB
""",
    right="""\
model = DistributedDataParallel(model, bucket_cap_mb=6)
""",
)
