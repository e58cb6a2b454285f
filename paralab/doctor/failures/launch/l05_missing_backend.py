"""L05: This torch has no such backend."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="L05",
    title="This torch has no such backend",
    symptom="'Distributed package doesn't have NCCL built in'.",
    cause="A build of torch for CPUs, or for Windows or macOS, has gloo only.",
    fix="Use gloo where there is no GPU, or install the CUDA build.",
    wrong="""\
dist.init_process_group("nccl")
""",
    right="""\
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
""",
    messages=(
        Message(
            r"Distributed package doesn't have (?P<backend>\w+) built in"
            r"|ProcessGroupNCCL is only supported with GPUs, no GPUs found|NCCL is not available",
            "{who} asks for NCCL or another backend that is not available{at}: this build of torch does "
            "not have it, or the machine has no GPU.",
        ),
    ),
)
