"""S14: The logged number is of one rank, or a sum."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S14",
    title="The logged number is of one rank, or a sum",
    symptom="A noisy curve, or one that is as many times too high as there are ranks.",
    cause="Rank 0 logs the loss of its own share, or all_reduce (a sum, if nothing else is said) is not divided.",
    fix="all_reduce, then divide by the world size; log that.",
    wrong="""\
shown = loss.detach().clone()
dist.all_reduce(shown)
print("loss", shown.item())
""",
    right="""\
shown = loss.detach().clone()
dist.all_reduce(shown)
print("loss", shown.item() / dist.get_world_size())
""",
    sources=(
        "Lightning-AI/pytorch-lightning#13364",
        "roboflow/rf-detr#909",
        "Lightning-AI/pytorch-lightning#19072",
    ),
)
