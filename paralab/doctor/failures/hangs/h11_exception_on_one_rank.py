"""H11: An exception on a rank ended the job."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.blame import Event, blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.messages import find_message, messages_in, named
from paralab.doctor.registry import Entry, Message, check

ENTRY = Entry(
    id="H11",
    title="An exception on a rank ended the job",
    symptom=(
        "One rank has a Python traceback. The others report 'Connection closed by peer' "
        "(gloo) or hang (NCCL)."
    ),
    cause=(
        "One rank failed: a bad sample, a failed assertion, a full GPU. The other errors are "
        "consequences."
    ),
    fix=("Fix the first error that is not a lost connection. `@record` makes torchrun print it."),
    example="""\
+ from torch.distributed.elastic.multiprocessing.errors import record
+
+
+ @record
  def main():
      train()


  main()
""",
    messages=(
        Message(
            r"CUDA out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)",
            "{who} ran out of GPU memory{at}: it tried to allocate {asked}.",
            fix="Use a smaller batch per rank with gradient accumulation, autocast, or activation "
            "checkpointing.",
        ),
        Message(
            r"NVRM: Xid \([^)]*\): (?P<xid>\d+)(?:, pid='?(?P<pid>\d+))?|CUDA error: .{0,40}ncorrectable ECC"
            r"|ncorrectable ECC error encountered",
            "The driver reports a hardware error (Xid {xid}, or ECC) on the GPU of {who}.",
            fix="Exclude this GPU or node and tell its administrator; `nvidia-smi -q` shows the counters.",
            kind="printed",
        ),
        Message(
            r"device-side assert",
            "A check inside a GPU kernel failed on {who}{at}, usually a class or token number out of "
            "range. The line is where it was noticed.",
            fix="CUDA_LAUNCH_BLOCKING=1 shows the right line. Compare the largest label with the number "
            "of classes.",
        ),
        Message(
            r"illegal memory access",
            "A GPU kernel of {who} accessed memory out of bounds{at}. The line is where it was noticed.",
            fix="CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer shows the kernel.",
        ),
        Message(
            r"NCCL_SOCKET_IFNAME set by environment to (?P<name>\S+)",
            "NCCL cannot use the network interface {name}, which NCCL_SOCKET_IFNAME names.",
            fix="Set NCCL_SOCKET_IFNAME to an interface that `ip addr` lists on every node, or unset it.",
            kind="printed",
            blames=False,
            beside=r"ncclInternalError|ncclSystemError|is neither AF_INET|no socket interface found",
        ),
        Message(
            r"ncclSystemError|unhandled system error|ncclSocketInit|with error 12, opcode|IBV_WC_RETRY_EXC_ERR"
            r"|transport retry counter exceeded",
            "NCCL reports a system error on {who}{at}: a problem of the network, the driver, or the "
            "machine, not of the training code.",
            fix="Run with NCCL_DEBUG=INFO and read NCCL's first WARN line. Check the interface "
            "(NCCL_SOCKET_IFNAME), the InfiniBand links, and /dev/shm.",
            kind="printed",
        ),
        Message(
            r"ncclUnhandledCudaError|unhandled cuda error|NCCL WARN Cuda failure",
            "A CUDA call inside NCCL failed on {who}{at}: the GPU was already in trouble, or the driver "
            "does not fit.",
            fix="Run with NCCL_DEBUG=INFO and look for the first CUDA error of this rank.",
            kind="printed",
        ),
        Message(
            r"unrecognized arguments: --local[-_]rank",
            "torch.distributed.launch passes --local-rank to the script, which does not accept it.",
            fix='Start with torchrun and read int(os.environ["LOCAL_RANK"]).',
            kind="printed",
        ),
    ),
)

OTHER_LOGS = "Give the logs of all ranks: torchrun --log-dir=logs --redirects=3, then paralab doctor job.log logs."
SIGNALS = {
    "SIGSEGV": "it accessed invalid memory: a bug in compiled code, or mixed library versions",
    "SIGABRT": "a check in compiled code failed; the lines before it say which",
    "SIGFPE": "compiled code divided an integer by zero",
}
ELSEWHERE = ("SIGKILL", "SIGILL", "SIGBUS")  # H12, L10, L11


@check("H11", source="log")
def known_message(logs: Logs) -> Iterator[Finding]:
    """Every message that an entry of the catalog knows."""
    yield from messages_in(logs)


@check("H11", source="log")
def other_exception(logs: Logs) -> Iterator[Finding]:
    roots = blame(logs).roots
    root = roots[0] if roots else None
    if root is None or root.trace is None or root.signal:
        return
    if find_message(root.trace.text, lines=logs.lines):
        return
    trace, at = root.trace, root.at
    same = [e for e in roots if e.trace and e.trace.kind == trace.kind and e.at == at]
    ranks = {event.rank for event in same}
    later = {event.rank for event in blame(logs).victims} - ranks - {None}
    why = f"{named(ranks)} raised `{trace.error[:200]}`" + (f" at {at}." if at else ".")
    if later:
        why += f" Later errors on {named(later).lower()} are consequences."
    fix = "Fix this exception first." if at else f"Fix this exception first. {OTHER_LOGS}"
    file, line = (at.file, at.line) if at else (None, None)
    rank = root.rank if len(same) == 1 and len(logs.ranks) > 1 else None
    yield Finding("H11", "error", why, fix, file, line, rank, root.evidence())


@check("H11", source="log")
def crash(logs: Logs) -> Iterator[Finding]:
    root = blame(logs).crash
    if root is None or root.signal in ELSEWHERE or in_ddp_constructor(root):
        return
    at = root.at
    same = {event.rank for event in blame(logs).roots if event.signal}
    where = f" at {at}" if at else ""
    meaning = SIGNALS.get(root.signal or "", "look at its last lines")
    words = [str(x) for x in logs.lines if "terminate called" in x.text or "what():" in x.text]
    yield Finding(
        "H11",
        "error",
        f"{named(same)} died of {root.signal}{where}: {meaning}.",
        "Run with python -X faulthandler to see the line.",
        at.file if at else None,
        at.line if at else None,
        root.rank if len(same) == 1 and len(logs.ranks) > 1 else None,
        (*words[:3], *root.evidence()),
    )


def in_ddp_constructor(event: Event) -> bool:
    """It died in DDP's own __init__ (H19)."""
    ddp = [frame for frame in event.frames if frame.file.endswith("nn/parallel/distributed.py")]
    innermost = event.frames[-1:] == ddp[-1:]
    return bool(ddp) and innermost and any(frame.function == "__init__" for frame in ddp)


@check("H11", source="log")
def silent_exit(logs: Logs) -> Iterator[Finding]:
    """An exit code or a lost connection, and nothing that explains it."""
    found = blame(logs)
    codes = [event for event in found.unknown if event.exit and event.exit.code != -2]
    lost = [event for event in found.victims if event.trace and not event.waited]
    if found.roots or any(find_message(line.text, ("printed",)) for line in logs.lines):
        return
    if codes:
        first = next((event for event in codes if event.exit and event.exit.first), codes[0])
        assert first.exit is not None
        code = first.exit.signal or f"code {first.exit.code}"
        # The others' words are in this log, so its own would be, too.
        own = len(logs.sources) == 1 and bool(found.victims) and (first.exit.code or 0) > 1
        why = f"{named([first.rank])} exited with {code} and printed no exception"
        why += "; the other ranks lost it." if own else " here. It may be the cause or a victim."
        fix = "Look for sys.exit and os._exit in this rank's code." if own else OTHER_LOGS
        rank, evidence = (first.rank if own else None), (str(first.line),)
        yield Finding("H11", "error" if own else "suspect", why, fix, rank=rank, evidence=evidence)
    elif lost and lost[0].rank is None and not found.absent and not logs.exits:
        who = named([lost[0].rank])
        why = f"{who} lost its connection to another rank. It is a victim: the cause is elsewhere."
        yield Finding("H11", "suspect", why, OTHER_LOGS, evidence=lost[0].evidence())
