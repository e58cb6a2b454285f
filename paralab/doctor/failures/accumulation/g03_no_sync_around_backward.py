"""G03: no_sync around backward only."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="G03",
    title="no_sync around backward only",
    symptom="Right results, but no time is saved: it still synchronizes.",
    cause="DDP decides in forward whether the next backward synchronizes, and forward ran outside of no_sync().",
    fix="Put forward into the block too.",
    wrong="""\
loss = criterion(model(x), y) / N
with model.no_sync():
    loss.backward()
""",
    right="""\
with model.no_sync():
    loss = criterion(model(x), y) / N
    loss.backward()
""",
    sources=(
        "facebookresearch/ClassyVision#706",
        "KellerJordan/modded-nanogpt#31",
        "pytorch/PiPPy#1133",
    ),
    silent=True,
)
