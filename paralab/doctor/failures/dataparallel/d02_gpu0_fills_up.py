"""D02: GPU 0 fills up first."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="D02",
    title="GPU 0 fills up first",
    symptom="Out of memory on GPU 0, with room on the others.",
    cause="The outputs are gathered there, and the parameters, their gradients and the optimizer live there.",
    fix="DistributedDataParallel; or compute the loss inside forward, so that only a number is gathered.",
    wrong="""\
model = nn.DataParallel(net)
loss = criterion(model(x), y)
""",
    right="""\
model = nn.DataParallel(WithLoss(net, criterion))
loss = model(x, y).mean()
""",
    limits="Needs GPUs whose memory can be read.",
)
