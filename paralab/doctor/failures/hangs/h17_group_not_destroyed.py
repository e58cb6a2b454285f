"""H17: The process group is never destroyed, or only by one rank."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="H17",
    title="The process group is never destroyed, or only by one rank",
    symptom=(
        "'destroy_process_group() was not called before program exit', or the job hangs at its end."
    ),
    cause="The script never calls destroy_process_group, or only some ranks reach the call.",
    fix="Call it on every rank when training ends, best in a `finally`.",
    wrong="""\
train(model, loader)
if dist.get_rank() == 0:
    dist.destroy_process_group()
""",
    right="""\
train(model, loader)
dist.destroy_process_group()
""",
    sources=("pytorch/pytorch#75097", "pytorch/pytorch#126275", "pytorch/pytorch#122358"),
    limits="Only NCCL prints the warning. gloo exits quietly.",
    messages=(
        Message(
            r"destroy_process_group\(\) was not called before program exit",
            "{who} exited without destroy_process_group(). The run itself ended well.",
            severity="warning",
            kind="note",
        ),
    ),
)
