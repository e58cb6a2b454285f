"""S10: The same random numbers on every rank."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S10",
    title="The same random numbers on every rank",
    symptom="No message. Dropout masks and augmentations are the same on all ranks, so there is less variety than it seems.",
    cause="torch.manual_seed gets the same number everywhere, and the loader's workers take their seeds from it.",
    fix="Build the model, then seed with `seed + rank`.",
    wrong="""\
torch.manual_seed(42)
model = DistributedDataParallel(Net())
""",
    right="""\
torch.manual_seed(42)
model = DistributedDataParallel(Net())
torch.manual_seed(42 + dist.get_rank())
""",
    sources=(
        "huggingface/transformers#37932",
        "nnaisense/bayesian-flow-networks#3",
        "huggingface/pytorch-image-models#1519",
        "pytorch/pytorch#3880",
    ),
    silent=True,
)
