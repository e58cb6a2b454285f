"""H17: The process group is not destroyed, or by one rank only."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="H17",
    title="The process group is not destroyed, or by one rank only",
    symptom="'destroy_process_group() was not called before program exit', or the job hangs when it should end.",
    cause="destroy_process_group is missing, or stands in a branch that not every rank enters.",
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
    limits="Only NCCL prints the warning; gloo ends quietly.",
    messages=(
        Message(
            r"destroy_process_group\(\) was not called before program exit",
            "{who} exited without destroy_process_group(). The run itself ended well.",
            severity="warning",
            kind="note",
        ),
    ),
)
