"""T06: Loader workers: too few, or more than cores."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="T06",
    title="Loader workers: too few, or more than cores",
    symptom="Steps wait for data, or all cores are busy and everything is slow.",
    cause="num_workers counts per rank; ranks × workers compete for the same cores.",
    fix="About (cores ÷ ranks) − 1 workers per rank, then measure.",
    wrong="""\
loader = DataLoader(data, batch_size=32, num_workers=16, sampler=sampler)
""",
    right="""\
cores = len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])
loader = DataLoader(data, batch_size=32, num_workers=max(1, cores - 1), sampler=sampler)
""",
    sources=("Lightning-AI/pytorch-lightning#18149", "pytorch/pytorch#105841"),
)
