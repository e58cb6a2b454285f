"""D06: DataParallel without GPUs does nothing."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="D06",
    title="DataParallel without GPUs does nothing",
    symptom="No message. It runs as if it were not wrapped.",
    cause="Without CUDA the list of devices is empty, and forward calls the model directly.",
    fix="Check torch.cuda.device_count(); for several CPU processes use DistributedDataParallel with gloo.",
    wrong="""\
model = nn.DataParallel(net)
""",
    right="""\
if torch.cuda.device_count() < 2:
    raise SystemExit("DataParallel needs two GPUs or more")
model = nn.DataParallel(net)
""",
    silent=True,
)
