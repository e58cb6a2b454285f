"""S05: Two forwards before backward, and buffers in between."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="S05",
    title="Two forwards before backward, and buffers in between",
    symptom=(
        "'one of the variables needed for gradient computation has been modified by an inplace operation', with "
        "DDP and BatchNorm."
    ),
    cause="The second forward broadcasts the buffers again and overwrites what the first one keeps for its backward.",
    fix="Backward after each forward, one forward over both batches, or no broadcast of buffers (forward_sync_buffers=False).",
    wrong="""\
model = DistributedDataParallel(model)
loss = model(real).mean() - model(fake).mean()
loss.backward()
""",
    right="""\
model = DistributedDataParallel(model)
real_scores, fake_scores = model(torch.cat([real, fake])).chunk(2)
loss = real_scores.mean() - fake_scores.mean()
loss.backward()
""",
    sources=(
        "pytorch/pytorch#22095",
        "pytorch/pytorch#66504",
        "pytorch/pytorch#65907",
        "pytorch/pytorch#73332",
        "pytorch/pytorch#175024",
    ),
    limits="Could not be provoked with torch 2.12 and 2.13 on CPU, where DDP keeps the version counter; so only a suspicion.",
    messages=(
        Message(
            r"one of the variables needed for gradient computation has been modified by an inplace "
            r"operation: \[(?P<tensor>[^\]]+\])\]?(?!.{0,20}which is output \d+ of T?(?:Backward|AsStrided)).{0,80}?"
            r"is at version (?P<now>\d+); expected version (?P<then>\d+)",
            "Backward{at} needs a tensor [{tensor}] at version {then}, but it has been overwritten "
            "(version {now}). With DDP, a second forward before backward does that: it broadcasts the "
            "buffers. Certain if the model has BatchNorm, is wrapped, and is called twice.",
            severity="suspect",
        ),
    ),
)
