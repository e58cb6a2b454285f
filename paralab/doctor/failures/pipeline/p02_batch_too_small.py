"""P02: The batch is smaller than the number of micro-batches. P01's checks report it.

Symptom: 'Tensor size 3 is smaller than num_chunks', or 'Expecting 4 arg_mbs but got 3'. Each stage prints a different error.
Cause: The last batch of the epoch has fewer samples than there are micro-batches.
Fix: Set `drop_last=True`.

  schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
- loader = DataLoader(data_of_11_samples, batch_size=8)
+ loader = DataLoader(data_of_11_samples, batch_size=8, drop_last=True)
"""

from paralab.doctor.registry import Message, describe

ENTRY = describe(
    __doc__,
    Message(
        r"Tensor size (?P<rows>\d+) is smaller than num_chunks"
        r"|Expecting \d+ arg_mbs but got (?P<chunks>\d+)",
        "A batch had fewer rows ({rows}{chunks}) than there are micro-batches{at}, usually the last "
        "batch of the loader.",
    ),
)
