"""D03: The batch gives fewer pieces than there are GPUs."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="D03",
    title="The batch gives fewer pieces than there are GPUs",
    symptom="'Caught TypeError in replica … missing 1 required positional argument', or some GPUs have nothing to do.",
    cause="Pieces are rounded up: 9 samples over 4 GPUs make pieces of 3, 3 and 3, and the fourth GPU gets none.",
    fix="A batch that is a multiple of the number of GPUs, and drop_last=True.",
    wrong="""\
model = nn.DataParallel(net, device_ids=[0, 1, 2, 3])
loader = DataLoader(data, batch_size=9)
""",
    right="""\
model = nn.DataParallel(net, device_ids=[0, 1, 2, 3])
loader = DataLoader(data, batch_size=8, drop_last=True)
""",
    sources=(
        "pytorch/pytorch#15161",
        "pytorch/pytorch#52260",
        "pytorch/pytorch#16432",
        "MIC-DKFZ/nnUNet#677",
    ),
    silent=True,
    messages=(
        Message(
            r"Caught TypeError in replica (?P<replica>\d+) on device (?P<device>\d+).*missing \d+ required "
            r"positional argument",
            "Replica {replica} on device {device} got no input{at}: the batch had too few rows for "
            "all GPUs (9 rows on 4 GPUs are chunks of 3, 3, 3, and nothing).",
        ),
    ),
)
