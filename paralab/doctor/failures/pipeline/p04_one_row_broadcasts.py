"""P04: The loss broadcasts a micro-batch of one row. P01's checks report it.

Symptom: torch warns about target sizes, and 7 rows give 8 outputs. Then the first stage fails in backward.
Cause: The last micro-batch has one row, but the receive buffer has two, and the loss broadcasts the single row.
Fix: Use a batch size that is a multiple of n_microbatches, and drop_last=True.
Reported: pytorch/pytorch#126600

  schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.MSELoss())
- loader = DataLoader(data, batch_size=7)
+ loader = DataLoader(data, batch_size=8, drop_last=True)
"""

from paralab.doctor.registry import Message, describe

ENTRY = describe(
    __doc__,
    Message(
        r"Failed to run stage backward:.*?Stage output: \('?Tensor\(torch\.Size\(\[(?P<sent>[\d, ]+)\]\)"
        r".*?Output gradient: \('?Tensor\(torch\.Size\(\[(?P<got>[\d, ]+)\]\)",
        "{who} sent a micro-batch of shape ({sent}) and got back a gradient of shape ({got}){at}. "
        "The next stage received it into a larger buffer, and broadcasting in the loss hid the "
        "mismatch.",
    ),
    silent=True,
)
