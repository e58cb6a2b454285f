"""L10: bf16 on this CPU ends with an illegal instruction."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="L10",
    title="bf16 on this CPU ends with an illegal instruction",
    symptom="'Fatal Python error: Illegal instruction' in a Linear under CPU autocast; exit code 132 or signal 4.",
    cause="The CPU says that it has AMX, but in this virtual machine the instructions cannot be used (inferred).",
    fix="`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` before torch is imported.",
    wrong="""\
import torch

with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = model(x).mean()
""",
    right="""\
import os

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
import torch

with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = model(x).mean()
""",
    silent=True,
    limits="Needs a CPU that lists AMX and does not carry it out, which tests cannot have: told from logs and by preflight.",
)
