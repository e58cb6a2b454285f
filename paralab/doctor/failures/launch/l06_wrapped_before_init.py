"""L06: DDP or the sampler before the process group."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="L06",
    title="DDP or the sampler before the process group",
    symptom="'Default process group has not been initialized, please make sure to call init_process_group'.",
    cause="DistributedDataParallel and DistributedSampler ask the group for rank and world size, and it does not exist yet.",
    fix="Call init_process_group first.",
    wrong="""\
sampler = DistributedSampler(data)
dist.init_process_group("gloo")
""",
    right="""\
dist.init_process_group("gloo")
sampler = DistributedSampler(data)
""",
    messages=(
        Message(
            r"(?:Default )?process group (?:has not been|is not) initialized",
            "{who} needs the process group{at} before init_process_group was called.",
        ),
    ),
)
