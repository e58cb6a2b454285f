"""P04: a micro-batch of one row is broadcast. P01's checks report it."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="P04",
    title="A last micro-batch of one row is broadcast",
    symptom="A warning about target sizes, and 8 outputs for 7 rows. Then the first stage fails in backward.",
    cause="The last micro-batch has one row, and the receive buffer has two. The loss broadcasts one to the other.",
    fix="Use equal micro-batches, as for P01.",
    example="""\
  schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.MSELoss())
- loader = DataLoader(data, batch_size=7)
+ loader = DataLoader(data, batch_size=8, drop_last=True)
""",
    sources=("pytorch/pytorch#126600",),
    silent=True,
    messages=(
        Message(
            r"Failed to run stage backward:.*?Stage output: \('?Tensor\(torch\.Size\(\[(?P<sent>[\d, ]+)\]\)"
            r".*?Output gradient: \('?Tensor\(torch\.Size\(\[(?P<got>[\d, ]+)\]\)",
            "{who} sent a micro-batch of shape ({sent}) and got a gradient of shape ({got}) back{at}. "
            "The next stage received it into a larger buffer, and the loss broadcast the difference.",
        ),
    ),
)
