"""H01: Uneven number of batches per rank."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="H01",
    title="Uneven number of batches per rank",
    symptom=(
        "Training freezes near the end of an epoch. gloo: 'Timed out waiting … for recv operation'; NCCL: a watchdog timeout."
    ),
    cause="One rank runs out of batches first and calls no backward any more; the others wait for its part of the all-reduce.",
    fix="Give every rank the same number of batches (DistributedSampler, drop_last), or train inside `with model.join():`.",
    wrong="""\
mine = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
loader = DataLoader(mine, batch_size=32)
""",
    right="""\
mine = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=mine)
""",
    sources=(
        "pytorch/pytorch#33148",
        "pytorch/pytorch#38174",
        "microsoft/PyMarlin#80",
        "Lightning-AI/pytorch-lightning#20404",
        "Lightning-AI/pytorch-lightning#9851",
    ),
)
