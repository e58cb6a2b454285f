"""G06: The rest of the epoch is dropped, or leaks into the next."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="G06",
    title="The rest of the epoch is dropped, or leaks into the next",
    symptom=(
        "No message. With 10 batches and N = 4, two batches per epoch make no step; their gradients are added to "
        "the next epoch."
    ),
    cause="The step is taken at multiples of N only, and the number of batches is none.",
    fix="Step also after the last batch, and divide by the passes that were really accumulated.",
    wrong="""\
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
""",
    right="""\
if (i + 1) % N == 0 or i + 1 == len(loader):
    optimizer.step()
    optimizer.zero_grad()
""",
    sources=(
        "timoschick/pet#36",
        "meta-pytorch/torchtune#2745",
        "Lightning-AI/pytorch-lightning#19987",
        "tomhosking/torchseq#8",
        "huggingface/transformers#2533",
    ),
    silent=True,
)
