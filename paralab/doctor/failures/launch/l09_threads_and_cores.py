"""L09: Threads of the ranks and cores of the machine do not match."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

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
    messages=(
        Message(
            r"This DataLoader will create (?P<asked>\d+) worker processes in total\. Our suggested max number "
            r"of worker .{0,80}?is (?P<cores>\d+)",
            "Each rank starts {asked} loader workers on {cores} cores, so they compete with training.",
            fix="Set num_workers to cores / ranks.",
            severity="warning",
            kind="printed",
        ),
        Message(
            r"Setting OMP_NUM_THREADS environment variable for each process to be (?P<threads>\d+) in default",
            "OMP_NUM_THREADS is not set, so torchrun gave every process {threads} thread. If the machine "
            "has more cores than ranks, work on the CPU is slower than necessary.",
            fix="Set OMP_NUM_THREADS to cores / ranks before torchrun.",
            severity="suspect",
            kind="note",
        ),
    ),
)
