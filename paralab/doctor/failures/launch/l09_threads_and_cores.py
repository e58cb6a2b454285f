"""L09: Threads of the ranks and cores of the machine do not match."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="L09",
    title="Threads of the ranks and cores of the machine do not match",
    symptom="CPU work is slow: one thread per rank where there are cores to spare, or every rank uses all cores at once.",
    cause="torchrun sets OMP_NUM_THREADS=1 if nobody else did; mp.spawn sets nothing, so each rank takes the whole machine.",
    fix="Threads per rank = cores ÷ ranks.",
    wrong="""\
def worker(rank, ranks):
    train(rank)
""",
    right="""\
def worker(rank, ranks):
    torch.set_num_threads(len(os.sched_getaffinity(0)) // ranks)
    train(rank)
""",
    sources=(
        "pytorch/pytorch#22501",
        "Lightning-AI/pytorch-lightning#18677",
        "pytorch/pytorch#20037",
        "pytorch/pytorch#22451",
    ),
)
