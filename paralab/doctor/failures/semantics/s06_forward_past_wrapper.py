"""S06: Forward past the wrapper, through model.module."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S06",
    title="Forward past the wrapper, through model.module",
    symptom="No message. The ranks train different models, and the one of rank 0 is saved.",
    cause="`model.module(x)` skips DDP's forward, which arms the synchronization: the gradients stay on their rank.",
    fix="Train through the wrapper: `model(x)`; for another method let forward choose it by an argument.",
    wrong="""\
model = DistributedDataParallel(net)
loss = criterion(model.module(x), y)
loss.backward()
""",
    right="""\
model = DistributedDataParallel(net)
loss = criterion(model(x), y)
loss.backward()
""",
    sources=("jingyaogong/minimind#853", "moojink/openvla-oft#160", "k2-fsa/icefall#226"),
    silent=True,
)
