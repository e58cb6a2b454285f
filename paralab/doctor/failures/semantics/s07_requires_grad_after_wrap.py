"""S07: requires_grad changed after wrapping."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S07",
    title="requires_grad changed after wrapping",
    symptom=(
        "Unfrozen after wrapping: no message, and those gradients differ from rank to rank. Frozen after wrapping: S01's error."
    ),
    cause="DDP decides when the model is wrapped which parameters it synchronizes.",
    fix="Freeze and unfreeze before wrapping, or wrap again.",
    wrong="""\
model = DistributedDataParallel(net)
for parameter in net.backbone.parameters():
    parameter.requires_grad = True
""",
    right="""\
for parameter in net.backbone.parameters():
    parameter.requires_grad = True
model = DistributedDataParallel(net)
""",
    sources=("huggingface/transformers#416", "JDAI-CV/fast-reid#178"),
    silent=True,
)
