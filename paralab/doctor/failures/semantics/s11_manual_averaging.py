"""S11: Gradients averaged by hand, from different first weights."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S11",
    title="Gradients averaged by hand, from different first weights",
    symptom="No message. The ranks start apart and never meet, although every gradient is synchronized.",
    cause="DDP copies the weights of rank 0 when it wraps a model; code that reduces gradients itself has to do it too.",
    fix="Broadcast every parameter and buffer from rank 0 before the first step.",
    wrong="""\
model = Net()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(average_over_ranks)
""",
    right="""\
model = Net()
for tensor in model.state_dict().values():
    dist.broadcast(tensor, src=0)
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(average_over_ranks)
""",
    silent=True,
)
