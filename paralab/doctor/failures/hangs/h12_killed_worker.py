"""H12: A worker was killed from outside.

Symptom: torchrun reports 'Signal 9 (SIGKILL)', without a traceback. The other ranks report 'Connection reset by peer'.
Cause: The machine or container ran out of memory and the kernel killed this process, or the scheduler killed the job.
Fix: Use less host memory (fewer loader workers, no separate copy of the data per rank), or ask for more.
Reported: lmzpai/roboMamba#10 yangjianxin1/Firefly#171 lzhxmu/CPPO#6 hiyouga/LlamaFactory#163

- samples = [load(path) for path in paths]
- loader = DataLoader(samples, batch_size=32, num_workers=16)
+ samples = LoadedWhenNeeded(paths)
+ loader = DataLoader(samples, batch_size=32, num_workers=2)
"""

import re

from paralab.doctor.logs.blame import blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Finding, Findings, Message, check, describe, printed
from paralab.units import plural, size

ENTRY = describe(
    __doc__,
    Message(
        r"was killed by SIGKILL|disappeared without an error|is gone without a word"
    ),  # paralab's launcher
    printed(
        r"DataLoader worker \(pid\(?s?\)? ?\d+\) is killed by signal: Killed",
        "A loader worker on {who} was killed with SIGKILL{at}. The kernel does this when "
        "the host runs out of memory.",
    ),
    Message(
        r"DataLoader worker \(pid\(?s?\)? ?\d+\) is killed by signal: Terminated",
        "A loader worker on {who} got SIGTERM{at}: the launcher, the scheduler, or a person "
        "stopped it. Look for an earlier error.",
        severity="suspect",
    ),
)

OOM_KILL = re.compile(
    r"Detected \d+ oom[-_]kill event|oom-kill:|tasks? [\d,\-]+: Out Of Memory"
    r"|Out of memory: Killed process|OOM Killed|Killed process \d+ \("
)
CANCELLED = re.compile(
    r"(?:JOB|STEP) (\S+) ON (\S+) CANCELLED AT (\S+) DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE|\w[\w ]*?) ?\*\*\*"
)
NODE = re.compile(r"Node failure on (\S+)")
SIGNALED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
RESUME = "Save checkpoints and resume."
AFTER_CANCEL = {
    "TIME LIMIT": "Ask for more time (#SBATCH --time), or save checkpoints and resume.",
    "PREEMPTION": "Save checkpoints and let Slurm requeue the job: #SBATCH --requeue.",
}


@check("H12", source="log")
def ended_from_outside(logs: Logs) -> Findings:
    found = blame(logs)
    for line in logs.lines:
        if match := CANCELLED.search(line.text):
            job, node, time, reason = match.groups()
            why = f"Slurm stopped job {job} on {node} at {time}: {reason.lower()}. No rank failed."
            fix = AFTER_CANCEL.get(reason, f"Resume without that node: --exclude={node}.")
        elif match := NODE.search(line.text):
            why = f"The node {match[1]} failed and took its ranks down."
            fix = f"Start again with --exclude={match[1]}."
        else:
            continue
        yield Finding("H12", "error", why, fix, evidence=(str(line),))
        return
    for trace in logs.tracebacks if not found.roots else ():
        if (match := SIGNALED.search(trace.error)) and match[1] not in ("1", "2"):
            why = "torchrun itself got a termination signal: the scheduler or a person stopped the job. "
            why += "The scheduler's log (sacct) would confirm this."
            yield Finding("H12", "suspect", why, RESUME, evidence=(str(trace.errors[-1]),))
            return
    yield from _report_killed_worker(logs)


def _report_killed_worker(logs: Logs) -> Findings:
    roots = blame(logs).roots
    killed = [event for event in roots if event.signal == "SIGKILL"]
    memory = [line for line in logs.lines if OOM_KILL.search(line.text)]
    if roots and roots[0] not in killed and not (memory and killed):
        return  # a rank failed on its own before that
    if not killed and not memory:
        return
    ranks = {event.rank for event in killed} or {line.rank for line in memory}
    rank = next(iter(ranks)) if len(ranks) == 1 else None
    who = killed[0].who if len(killed) == 1 else "A rank" if rank is None else f"Rank {rank}"
    known = (
        "The kernel reports that memory ran out."
        if memory
        else "SIGKILL leaves no time to print an error."
    )
    evidence = dict.fromkeys([*map(str, memory[:3]), *(str(event.line) for event in killed)])
    why = (
        f"Another process killed {who} with SIGKILL. {known} The other ranks only lost their "
        "connection."
    )
    fix = f"{ENTRY.fix} `dmesg | grep -i oom` shows whether memory ran out."
    yield Finding("H12", "error", why, fix, rank=rank, evidence=tuple(evidence))


RANK_BYTES = 2**30  # host memory of a rank; torch alone takes a third, or with CUDA more than half


@check("H12", source="machine")
def little_memory(facts: Facts) -> Findings:
    """Report a container or job that has too little memory for its ranks or already ran out of
    memory."""
    cgroup, ranks, evidence = facts.cgroup, facts.ranks_here or 2, facts.evidence("memory")
    if cgroup is None:
        return
    limit, used = cgroup.limit_bytes, cgroup.used_bytes
    if limit is not None and used is not None and limit - used < ranks * RANK_BYTES:
        why = (
            f"This container or job has {size(limit - used)} of its {size(limit)} left, and {ranks} ranks "
            f"need about {size(RANK_BYTES)} each. When memory runs out, the kernel kills a rank."
        )
        doubt = "if your ranks need that much"
        yield make_finding("H12", "suspect", why, None, evidence, doubt=doubt)
    if cgroup.killed:
        why = (
            f"The kernel has killed {plural(cgroup.killed, 'process')} in this container or job "
            "because memory ran out."
        )
        yield make_finding("H12", "suspect", why, None, evidence, doubt="if one was a rank")
