"""W01: Communication takes over a tenth of the step."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="W01",
    title="Communication takes over a tenth of the step",
    symptom="More ranks make it hardly faster.",
    cause="Too little computing between two synchronizations, for the bytes that they send.",
    fix="A larger batch per rank, accumulation with no_sync(), compressed gradients, or smaller buckets that hide more of it.",
    wrong="""\
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(model)
""",
    right="""\
loader = DataLoader(data, batch_size=64, sampler=sampler)
model = DistributedDataParallel(model)
model.register_comm_hook(None, default_hooks.bf16_compress_hook)
""",
)
