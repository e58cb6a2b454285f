"""P05: A pipeline with one micro-batch."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="P05",
    title="A pipeline with one micro-batch",
    symptom="No message. One stage works at a time: with S stages, (S−1)/S of the devices' time is idle.",
    cause="Nothing can overlap if the batch flows through in one piece.",
    fix="At least four micro-batches per stage.",
    wrong="""\
schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=loss_fn)
""",
    right="""\
schedule = ScheduleGPipe(stage, n_microbatches=4 * stage.num_stages, loss_fn=loss_fn)
""",
    silent=True,
)
