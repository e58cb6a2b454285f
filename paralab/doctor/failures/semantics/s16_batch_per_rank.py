"""S16: The batch of one rank is as large as the global batch."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S16",
    title="The batch of one rank is as large as the global batch",
    symptom="Out of memory, or a batch that is as many times larger as there are ranks.",
    cause="`batch_size` counts samples per rank; the number from the single-device script was taken over.",
    fix="Divide it by the world size.",
    wrong="""\
GLOBAL_BATCH = 256
loader = DataLoader(data, batch_size=GLOBAL_BATCH, sampler=DistributedSampler(data))
""",
    right="""\
GLOBAL_BATCH = 256
loader = DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=DistributedSampler(data))
""",
    limits="Only names (global_batch, total_batch) tell what was meant, so it stays a suspicion.",
)
