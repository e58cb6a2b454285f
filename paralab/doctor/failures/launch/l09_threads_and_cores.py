"""L09: Too many or too few threads per rank.

Symptom: CPU work is slow: each rank has one thread although cores are free, or every rank uses all
cores.
Cause: torchrun sets OMP_NUM_THREADS to 1 if you do not set it. mp.spawn does not set it, so each rank uses all cores.
Fix: Set the number of threads per rank to cores ÷ ranks.
Reported: pytorch/pytorch#22501 #20037 #22451 Lightning-AI/pytorch-lightning#18677

  def worker(rank, ranks):
+     torch.set_num_threads(len(os.sched_getaffinity(0)) // ranks)
      train(rank)
"""

from dataclasses import replace

from paralab.doctor.events import Threads
from paralab.doctor.observation import Observation
from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding, ranks_by_host
from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, Findings, check, describe, note, printed
from paralab.units import plural

ENTRY = describe(
    __doc__,
    printed(
        r"This DataLoader will create (?P<asked>\d+) worker processes in total\. Our suggested max number "
        r"of worker .{0,80}?is (?P<cores>\d+)",
        "Each rank starts {asked} loader workers on {cores} cores, so they compete with training.",
        fix="Set num_workers to cores / ranks.",
        severity="warning",
    ),
    note(
        r"Setting OMP_NUM_THREADS environment variable for each process to be (?P<threads>\d+) in default",
        "OMP_NUM_THREADS is not set, so torchrun gave every process {threads} thread. If the machine "
        "has more cores than ranks, work on the CPU is slower than necessary.",
        fix="Set OMP_NUM_THREADS to cores / ranks before you start torchrun.",
        severity="suspect",
    ),
)


MANY_CORES = 4  # cores per rank; with one thread, three of them idle


@check("L09", source="ranks")
def too_many_threads(seen: Observation) -> Findings:
    for ranks in ranks_by_host(seen).values():
        threads = [(rank.last(Threads) or rank.start).threads for rank in ranks]
        cores = max(rank.start.cores for rank in ranks)
        crowded = judge_threads(max(threads), len(ranks), cores, "rank")
        if len(ranks) == 1 or max(threads) == 1 or any(rank.start.gpus for rank in ranks):
            continue
        if crowded and sum(threads) > cores:
            yield crowded


@check("L09", source="machine")
def threads(facts: Facts) -> Findings:
    """Report too many threads per rank, or one thread where many cores are free."""
    ranks, launch = facts.launch.local_ranks, facts.launch
    if facts.torch is None or not ranks or ranks < 2:
        return
    asked = facts.environment.get("OMP_NUM_THREADS", "")
    share, evidence = facts.cores // ranks, facts.evidence("threads", "cores")
    if launch.by == "torchrun" and not asked:
        return  # torchrun sets one thread per rank
    crowded = judge_threads(facts.torch.threads, ranks, facts.cores, "rank")
    if crowded and facts.torch.threads > 1:
        yield replace(crowded, evidence=evidence)
    elif asked == "1" and share >= MANY_CORES:
        why = (
            f"OMP_NUM_THREADS=1 with {facts.cores} cores for {ranks} ranks: each rank uses one "
            f"thread, but could use {share}."
        )
        fix = f"Set OMP_NUM_THREADS={share}."
        doubt = "if the ranks compute on the CPU (transforms, losses)"
        yield make_finding("L09", "suspect", why, None, evidence, fix=fix, doubt=doubt)


def judge_threads(
    threads: int, processes: int, cores: int, each_is: str = "process"
) -> Finding | None:
    """Report more compute threads than cores, over all processes."""
    if threads * processes <= cores:
        return None
    each = max(1, cores // processes)
    why = (
        f"{plural(processes, each_is)} × {plural(threads, 'compute thread')} = {threads * processes} "
        f"on {plural(cores, 'core')}. The threads take turns, and a rank that waits for its turn "
        "delays all others."
    )
    fix = f"Set OMP_NUM_THREADS={each} (cores / ranks) before Python starts, or call torch.set_num_threads({each})."
    if processes > cores:
        fix = f"Use at most {plural(cores, each_is)} on this machine, with OMP_NUM_THREADS=1."
    evidence = (f"{threads} threads × {processes} > {cores} cores",)
    return Finding("L09", "warning", why, fix, evidence=evidence)


@check_each_run("L09")
def threads_in_run(run: Run) -> Finding | None:
    # Without micro-batches, model parallelism uses one device at a time.
    if run.plan.device != "cpu" or run.plan.strategy == "mp":
        return None
    return judge_threads(run.plan.threads_per_device, run.devices_per_node, run.cores, "device")
