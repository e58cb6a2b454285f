"""P01: The batch is no multiple of the micro-batches."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="P01",
    title="The batch is no multiple of the micro-batches",
    symptom=(
        "The last stage: 'The size of tensor a (3) must match the size of tensor b (2)' in the loss; the first: a "
        "lost connection."
    ),
    cause="The pieces differ in size, and the buffers in which stages receive keep the shape of the first piece.",
    fix="A batch that is a multiple of n_microbatches, and drop_last=True.",
    wrong="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
loader = DataLoader(data, batch_size=10)
""",
    right="""\
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
loader = DataLoader(data, batch_size=12, drop_last=True)
""",
    sources=("pytorch/pytorch#126600", "pytorch/torchtitan#947", "Coobiw/MPP-LLaVA#25"),
    silent=True,
    messages=(
        Message(
            r"pipelining[/\\](?:schedules|stage)\.py.*The size of tensor a \((?P<a>\d+)\) must match "
            r"the size of tensor b \((?P<b>\d+)\)",
            "{who} got micro-batches of {a} and {b} rows in one step{at}. The number of micro-batches "
            "does not divide the batch, and receive buffers keep the shape of the first micro-batch.",
        ),
    ),
)
