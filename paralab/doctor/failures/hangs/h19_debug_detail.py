"""H19: TORCH_DISTRIBUTED_DEBUG=DETAIL brings the job down itself."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="H19",
    title="TORCH_DISTRIBUTED_DEBUG=DETAIL brings the job down itself",
    symptom=(
        "Healthy scripts on gloo with DDP die with SIGSEGV (exit code -11) while the model is wrapped; elsewhere false alarms."
    ),
    cause="A fault in the extra checks that DETAIL switches on, in torch itself (seen with 2.12 and 2.13).",
    fix="Use INFO; for collectives that do not meet, use the flight recorder or `paralab doctor -- COMMAND`.",
    wrong="""\
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
import torch  # reads it

dist.init_process_group("gloo")
model = DistributedDataParallel(model)
""",
    right="""\
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
import torch  # reads it

dist.init_process_group("gloo")
model = DistributedDataParallel(model)
""",
    sources=(
        "pytorch/pytorch#148976",
        "pytorch/pytorch#129672",
        "pytorch/pytorch#178977",
        "pytorch/pytorch#75011",
    ),
    silent=True,
    limits="Seen on gloo; whether NCCL is affected was not tried. A variable of the surroundings is not in the script.",
)
