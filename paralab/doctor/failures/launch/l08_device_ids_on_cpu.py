"""L08: device_ids for a model that is on the CPU."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="L08",
    title="device_ids for a model that is on the CPU",
    symptom=(
        "'DistributedDataParallel device_ids and output_device arguments only work with … GPU modules', though "
        "CPU is named too."
    ),
    cause="The model was not moved to the GPU before it was wrapped, or a script for GPUs runs on CPU ranks.",
    fix="Move the model first; on CPU ranks leave device_ids out.",
    wrong="""\
model = DistributedDataParallel(Net(), device_ids=[local_rank])
""",
    right="""\
model = DistributedDataParallel(Net().to(local_rank), device_ids=[local_rank])
""",
    messages=(
        Message(
            r"device_ids and output_device arguments only work with .{0,80}but got device_ids "
            r"(?P<ids>\[[^\]]*\])",
            "DDP got device_ids={ids}{at}, but the model's parameters are not on that GPU.",
        ),
    ),
)
