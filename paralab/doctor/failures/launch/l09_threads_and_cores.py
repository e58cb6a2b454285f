"""L09: Threads of the ranks and cores of the machine do not match."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import Entry, Message, check
from paralab.units import plural

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


def judge_threads(
    threads: int, processes: int, cores: int, each_is: str = "process"
) -> Finding | None:
    """Compare the compute threads of all processes with the cores."""
    if threads * processes <= cores:
        return None
    each = max(1, cores // processes)
    why = (
        f"{plural(processes, each_is)} × {plural(threads, 'compute thread')} = {threads * processes} "
        f"on {plural(cores, 'core')}: the threads take turns, and a rank that waits for its turn "
        "delays all others."
    )
    fix = (
        f"Set OMP_NUM_THREADS={each} (cores / ranks) before Python starts, or call "
        f"torch.set_num_threads({each}) in every rank."
    )
    if processes > cores:
        fix = f"No more than {plural(cores, each_is)} on this machine, with OMP_NUM_THREADS=1."
    evidence = (f"{threads} threads × {processes} > {cores} cores",)
    return Finding("L09", "warning", why, fix, evidence=evidence)


@check("L09", source="run")
def threads_in_run(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        # Without micro-batches, model parallelism uses one device at a time.
        if run.plan.device == "cpu" and run.plan.strategy != "mp":
            nodes = len({rank.node for rank in run.plan.ranks}) or 1
            devices = -(-len(run.result.grid.devices) // nodes)
            cores = run.recording.manifest.machine.cores
            yield from run.report(
                judge_threads(run.plan.threads_per_device, devices, cores, "device")
            )
