"""P04: A last micro-batch of one row is stretched."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="P04",
    title="A last micro-batch of one row is stretched",
    symptom="A warning about target sizes, a loss and 8 outputs for 7 rows; then the first stage fails in backward.",
    cause="The last piece has one row, the receive buffer two; the loss broadcasts one against the other.",
    fix="As P01: equal pieces.",
    wrong="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.MSELoss())
loader = DataLoader(data, batch_size=7)
""",
    right="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.MSELoss())
loader = DataLoader(data, batch_size=8, drop_last=True)
""",
    sources=("pytorch/pytorch#126600",),
    silent=True,
)
