"""H08: Stopping early on a metric of one's own."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="H08",
    title="Stopping early on a metric of one's own",
    symptom="One rank leaves the loop; the others time out one step later.",
    cause="Every rank compares the loss of its own batches, so they decide differently.",
    fix="Reduce the metric, or broadcast the decision of rank 0, before anybody stops.",
    wrong="""\
if loss.item() < 0.01:
    break
""",
    right="""\
total = loss.detach().clone()
dist.all_reduce(total)
if total.item() / dist.get_world_size() < 0.01:
    break
""",
    sources=(
        "Lightning-AI/pytorch-lightning#379",
        "Lightning-AI/pytorch-lightning#3381",
        "speechbrain/speechbrain#2051",
    ),
)
