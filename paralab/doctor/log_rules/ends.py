"""The root cause: a rank's own exception or signal, a rank that left without a word, and what
torchrun made of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding, Severity
from paralab.doctor.logs.blame import Event
from paralab.doctor.logs.cuda import cuda_trouble, driver_line
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.places import alone, stands
from paralab.doctor.logs.said import blamed, errors, is_claimed, lines, tells
from paralab.doctor.registry import check
from paralab.units import plural

OOM_KILL = re.compile(
    r"Detected \d+ oom[-_]kill event|oom-kill:|tasks? [\d,\-]+: Out Of Memory|Out of memory: Killed process|OOM "
    r"Killed|Killed process \d+ \("
)
CANCELLED = re.compile(
    r"(?:JOB|STEP) (\S+) ON (\S+) CANCELLED AT (\S+)(?: DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE[^*]*|\w[\w ]*?))? ?\*\*\*"
)
NODE = re.compile(r"Node failure on (\S+)")
SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
PID = re.compile(r"\bpid=(\d+)")
ILLEGAL = re.compile(r"Fatal Python error: Illegal instruction")
_error: Severity = "error"
_suspect: Severity = "suspect"
REASONS = {
    "SIGSEGV": "memory was touched that is not its own; a bug in a compiled extension, mixed library versions, or a full stack",
    "SIGABRT": "a check in compiled code failed; the lines before it tell which",
    "SIGFPE": "an integer was divided by zero in compiled code",
}


def first_root(logs: Logs) -> Event | None:
    roots = blamed(logs).roots
    return roots[0] if roots else None


@check("H11", source="log")
def own_exception(logs: Logs) -> Iterator[Finding]:
    """Any exception that no other rule knows; CUDA's words are explained."""
    root = first_root(logs)
    if (
        root is None
        or root.trace is None
        or is_claimed(logs, root.trace.text)
        or "Fatal Python error" in root.trace.error
    ):
        return
    same = [
        e
        for e in blamed(logs).roots
        if e.trace and e.trace.kind == root.trace.kind and e.where == root.where
    ]
    ranks = sorted({event.rank for event in same if event.rank is not None})
    at = root.trace.where
    place = f" at {at.file}:{at.line} (`{at.code}`)" if at else ""
    alone = len(same) == 1
    who = (
        f"Rank {ranks[0]}"
        if len(ranks) == 1
        else f"Ranks {', '.join(map(str, ranks))}"
        if ranks
        else "A process"
    )
    others = sorted(
        {event.rank for event in blamed(logs).victims if event.rank is not None} - set(ranks)
    )
    noticed = (
        f" What {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} said follows from it."
        if others
        else ""
    )
    known = cuda_trouble(root.trace.text)
    why = (
        f"{who} raised `{_shortened(root.trace.error)}`{place}."
        + (f" {known.why}" if known else "")
        + noticed
    )
    fix = known.fix if known else "repair this line; the other ranks' errors go with it"
    rank = root.rank if alone and len(logs.ranks) > 1 else None
    yield Finding(
        "H11",
        "error",
        why,
        fix,
        at.file if at else None,
        at.line if at else None,
        rank,
        root.evidence(),
    )


@check("H11", source="log")
def hardware(logs: Logs) -> Iterator[Finding]:
    """The driver's and the kernel's lines, where no Python exception tells of them."""
    if not any(event.trace for event in blamed(logs).roots) and (told := driver_line(logs)):
        line, known = told
        pid = PID.search(line.text)
        owner = next(
            (exit_.rank for exit_ in logs.exits if pid and exit_.pid == int(pid[1])), line.rank
        )
        yield Finding("H11", "error", known.why, known.fix, rank=owner, evidence=(str(line),))


@check("H11", source="log")
def silent_exit(logs: Logs) -> Iterator[Finding]:
    """An exit code and nothing else: sys.exit(3), or the rank's own words are in another file."""
    blame = blamed(logs)
    codes = [event for event in blame.unknown if event.exit is not None and event.exit.code != -2]
    if blame.roots or not codes or driver_line(logs) or list(_killed(logs)):
        return
    first = next((event for event in codes if event.exit and event.exit.first), codes[0])
    assert first.exit is not None
    together = (
        len(logs.sources) == 1 and blame.victims and (first.exit.code or 0) > 1
    )  # others' words are here: so would be its own
    accused = f"Rank {first.rank} ended itself with {first.exit.signal or f'code {first.exit.code}'} and without an exception"
    if together:
        why = f"{accused}; the other ranks lost it."
    else:
        why = f"{accused} that these logs hold. Whether it is the cause or a victim, its own words (standard error) would tell."
    yield Finding(
        "H11",
        "error" if together else "suspect",
        why,
        "look for sys.exit and os._exit in this rank's code"
        if together
        else "give the logs of all ranks too: torchrun --log-dir=logs --redirects=3, then paralab doctor job.log logs",
        rank=first.rank if together else None,
        evidence=(str(first.line),),
    )


@check("H12", source="log")
def killed(logs: Logs) -> Iterator[Finding]:
    yield from _killed(logs)


def _killed(logs: Logs) -> Iterator[Finding]:
    cancelled = lines(logs, CANCELLED)
    if cancelled and (reason := cancelled.match[4]):
        job, node, at = cancelled.match.group(1, 2, 3)
        fix = {
            "TIME LIMIT": "ask for more time (#SBATCH --time), or save checkpoints and resume: #SBATCH --signal=B:USR1@120",
            "PREEMPTION": "save checkpoints and let the job be requeued: #SBATCH --requeue",
        }.get(
            reason,
            "start the job again from its last checkpoint, without that node: --exclude=" + node,
        )
        yield cancelled.finding(
            "H12",
            "error",
            f"Slurm ended job {job} on {node} at {at} because of its {reason.lower()}; no rank is to blame.",
            fix,
        )
        return
    if node_failure := lines(logs, NODE):
        name = node_failure.match[1]
        yield node_failure.finding(
            "H12",
            "error",
            f"The node {name} failed, and its ranks with it.",
            f"start again with --exclude={name}",
        )
        return
    if (ended := _launcher_ended(logs)) and not blamed(logs).roots:
        yield ended
        return
    roots = [event for event in blamed(logs).roots if event.exit and event.exit.signal == "SIGKILL"]
    memory = lines(logs, OOM_KILL)
    if memory is None and (
        not roots or (root := first_root(logs)) is None or root.exit is not roots[0].exit
    ):
        return
    if memory is not None and any(event.trace for event in blamed(logs).roots) and not roots:
        return  # a rank's own exception came first; what was killed was its data worker or another job's
    evidence = tuple(
        dict.fromkeys((*(memory.evidence if memory else ()), *(str(event.line) for event in roots)))
    )
    rank = roots[0].rank if len(roots) == 1 else memory.rank if memory else None
    who = f"Rank {rank}" if rank is not None else "A rank"
    said = (
        "the kernel says that memory ran out"
        if memory
        else "the process could not say a word: that is how the kernel's memory killer and schedulers end it"
    )
    yield Finding(
        "H12",
        "error",
        f"{who} was killed with SIGKILL from outside; {said}. The others only lost their connection to it.",
        "less host memory per rank: fewer num_workers, a smaller prefetch_factor, no pin_memory, or ask for more (#SBATCH "
        "--mem); `dmesg | grep -i oom` and memory.events of the cgroup tell whether it was memory",
        rank=rank,
        evidence=evidence,
    )


def _launcher_ended(logs: Logs) -> Finding | None:
    """torchrun itself got a signal: SIGINT is the user's own hand and no mistake."""
    told = [
        trace
        for trace in logs.tracebacks
        if (found := SIGNALLED.search(trace.error)) and found[1] != "2"
    ]
    if not told:
        return None
    return Finding(
        "H12",
        "suspect",
        "torchrun itself was told to end (SIGTERM or alike) and passed it on: the job was ended from outside, by the scheduler "
        "or a person; no rank is to blame. The scheduler's own log (scontrol show job, sacct) makes it certain.",
        "look for a time limit, preemption or scancel; save checkpoints and resume",
        evidence=(str(told[0].errors[-1]),),
    )


@check("L10", source="log")
def illegal_instruction(logs: Logs) -> Iterator[Finding]:
    said = errors(logs, ILLEGAL)
    roots = [event for event in blamed(logs).roots if event.exit and event.exit.signal == "SIGILL"]
    if said is None and not roots:
        return
    rank = said.rank if said else roots[0].rank
    at = said.at if said else ""
    evidence = (*(said.evidence if said else ()), *(str(event.line) for event in roots))
    yield Finding(
        "L10",
        "error",
        f"{f'Rank {rank}' if rank is not None else 'A process'} met a machine instruction{at} that this CPU does not carry out. "
        "With bfloat16 or float16 on a virtual machine it is AMX: the CPU lists it and the hypervisor does not allow it.",
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, before torch is imported",
        said.file if said else None,
        said.line if said else None,
        rank,
        evidence,
    )


@tells("H11", "H19", "L11")
def other_signal(logs: Logs) -> Iterator[Finding]:
    """Also H19: the debug level that crashes DDP on gloo, and L11: a bus error."""
    root = first_root(logs)
    fault = (
        root is not None
        and root.trace is not None
        and root.trace.error.startswith("Fatal Python error")
    )
    if root is None or not (root.exit or fault):
        return
    name = (root.exit.signal if root.exit else None) or _signal_of(
        root.trace.error if root.trace else ""
    )
    if name in ("SIGKILL", "SIGILL"):
        return
    at = root.trace.where if root.trace else None
    where = f" at {at.file}:{at.line}" if at else ""
    evidence = (
        *(
            str(line)
            for line in logs.lines
            if "terminate called" in line.text or "what():" in line.text
        ),
        *root.evidence(),
    )
    id, severity = "H11", _error
    if name == "SIGSEGV" and _in_constructor(root):
        id, severity, fix = "H19", _suspect, "TORCH_DISTRIBUTED_DEBUG=INFO"
        why = f"crashed in the constructor of DDP{where}, as healthy scripts do on gloo with TORCH_DISTRIBUTED_DEBUG=DETAIL"
        why += "; certain if that is set"
    elif name == "SIGBUS":
        id, severity = "L11", _suspect
        why = f"died of SIGBUS{where}: a page of shared memory or of a mapped file could not be had; /dev/shm is full, as a rule"
        fix = "df -h /dev/shm while it runs makes it certain; --shm-size=8g for containers"
    else:
        why = f"died of {name}{where}: {REASONS.get(name, 'ended by this signal')}"
        fix = "python -X faulthandler shows the line; the last lines of this rank help"
    same = {
        event.rank
        for event in blamed(logs).roots
        if (event.exit or event is root) and event.rank is not None
    }
    rank = root.rank if len(same) == 1 and len(logs.ranks) > 1 else None
    who = (
        f"Rank {rank}"
        if rank is not None
        else f"{plural(len(same), 'rank')}"
        if len(same) > 1
        else "A process"
    )
    yield Finding(
        id,
        severity,
        f"{who} {why}.",
        fix,
        at.file if at else None,
        at.line if at else None,
        rank,
        evidence,
    )
    if (
        id == "H11"
        and name == "SIGSEGV"
        and at is None
        and len(same) > 1
        and same.issuperset(logs.ranks)
    ):
        yield Finding(
            "H19",
            _suspect,
            f"All {len(same)} ranks died of SIGSEGV without a traceback, as healthy scripts do on gloo with "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL when DDP wraps the model. Certain if that is set, in the script or around it.",
            "TORCH_DISTRIBUTED_DEBUG=INFO",
            evidence=evidence,
        )


def _in_constructor(root: Event) -> bool:
    """It was DDP's own __init__ that it died in."""
    frames = root.trace.frames if root.trace else []
    own = [frame.file.endswith("nn/parallel/distributed.py") for frame in frames]
    return (
        bool(frames)
        and own[-1]
        and any(
            ours and frame.function == "__init__" for ours, frame in zip(own, frames, strict=True)
        )
    )


def _signal_of(error: str) -> str:
    words = {
        "Segmentation fault": "SIGSEGV",
        "Bus error": "SIGBUS",
        "Aborted": "SIGABRT",
        "Illegal instruction": "SIGILL",
    }
    return next(
        (name for word, name in words.items() if word in error),
        "SIGFPE" if "Floating" in error else "a fatal error",
    )


@tells("H01", "H02", "H03", "H07")
def left_without_a_word(logs: Logs) -> Iterator[Finding]:
    """Nobody has an error of its own, and somebody is gone: the rank that ended well, and too
    early; or all others have ended as they should, and one calls a collective alone."""
    blame = blamed(logs)
    gone = [event for event in blame.victims if event.trace and not event.waited]
    if (
        blame.roots
        or blame.unknown
        or not gone
        or any(event.waited or event.exit for event in blame.victims)
    ):
        return
    first = gone[0]
    if first.alone:
        yield alone(
            first,
            f"Rank {first.rank} was {stands(first)}, under a rank condition, when the others had already ended.",
        )
        return
    at = first.trace.where if first.trace else None
    sure = first.alone is False
    rank = blame.silent[0] if len(blame.silent) == 1 and sure else None
    names = ", ".join(map(str, blame.silent))
    who = (
        f"Rank {rank}"
        if rank is not None
        else f"Of the ranks {names} one"
        if blame.silent
        else "Another rank"
    )
    last = logs.last.get(rank) if rank is not None else None
    says = f" Its last line is `{_shortened(last.text.strip())}` ({last.place})." if last else ""
    reported = bool(
        logs.exits
    )  # the launcher names all that failed, and this one is not among them
    how = "ended with code 0" if reported else "is gone"
    why = f"{who} left no error and {how} while rank {first.rank} still needed it: that was {stands(first)}.{says}"
    if not reported:
        why += " How it ended would be certain with the launcher's own output."
    if not sure:
        why += " Certain if that line is not under a rank condition; if it is, that rank calls it alone and the others are right."
    elif rank is None:
        why += " Which rank it was would be certain with the logs of all ranks."
    evidence = (*first.evidence(), *((str(last),) if last else ()))
    fix = "let all ranks leave together: no return or sys.exit under a rank condition, and dist.barrier() before the end"
    yield Finding(
        "H02",
        "error" if rank is not None and reported else "suspect",
        why,
        fix,
        rank=rank,
        evidence=evidence,
    )
    if first.in_backward and (reported or rank is not None):  # else it may as well have been killed
        yield Finding(
            "H01",
            "suspect",
            f"{who} ended while rank {first.rank} was {stands(first)}: if it came to the end of its loop, it had fewer batches. "
            "Certain with len(loader) of each rank.",
            "DistributedSampler with drop_last=True, the same number of steps everywhere, or `with model.join():`",
            at.file if at else None,
            at.line if at else None,
            rank,
            evidence,
        )


@check("H16", source="log")
def torchrun_names_the_victim(logs: Logs) -> Iterator[Finding]:
    accused, blame = logs.accused, blamed(logs)
    if accused is None or any(event.rank is None for event in blame.roots):
        return
    of_accused = [event for event in blame.victims if event.rank == accused.rank]
    own = [event for event in (*blame.roots, *blame.unknown) if event.rank == accused.rank]
    if (
        own or not of_accused or of_accused[0].exit
    ):  # an abort in a mismatch: one side of it, like the other
        return
    victim = of_accused[0]
    if not blame.roots and victim.alone is not False:
        return  # it may have called a collective alone, and torchrun may be right
    if not blame.roots and not blame.absent:
        return  # all ranks noticed something: another rule tells what
    root = (
        blame.roots[0].rank if blame.roots else blame.absent[0] if len(blame.absent) == 1 else None
    )
    why = "whose own error came first" if blame.roots else "which left no error at all"
    yield Finding(
        "H16",
        "warning",
        f"torchrun's root cause is rank {accused.rank}, the first process whose end it saw; that rank only noticed that another "
        "one was gone "
        "or did not come. "
        + (
            f"Look at rank {root}, {why}."
            if root is not None
            else "Look at a rank that left no error."
        ),
        "decorate main with torch.distributed.elastic.multiprocessing.errors.record, and keep a log per rank (--log-dir, "
        "--redirects=3)",
        rank=root,
        evidence=(str(accused.line), *victim.evidence()[-1:]),
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + " …"
