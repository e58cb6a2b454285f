"""S01: Parameters that take no part in the loss."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S01",
    title="Parameters that take no part in the loss",
    symptom="'Expected to have finished reduction in the prior iteration before starting a new one', one step after the cause.",
    cause="DDP waits for a gradient of every parameter; layers that forward or the loss leave out never deliver one.",
    fix="Remove or freeze them before wrapping, or say `find_unused_parameters=True`.",
    wrong="""\
model = Net()  # .auxiliary is not used in forward
model = DistributedDataParallel(model)
""",
    right="""\
model = Net()  # .auxiliary is not used in forward
model.auxiliary.requires_grad_(False)
model = DistributedDataParallel(model)
""",
    sources=("huggingface/accelerate#2017", "pytorch/pytorch#22049"),
)
