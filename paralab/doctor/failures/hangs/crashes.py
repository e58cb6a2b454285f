"""Explain the signals that killed ranks, from logs. SIGKILL comes from another process (H12); other
signals come from native code."""

from paralab.doctor.logs.blame import Event, blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.messages import named
from paralab.doctor.registry import Findings, Severity, check

CRASHES: dict[str, tuple[str, Severity, str]] = {
    "SIGSEGV": (
        "H11",
        "error",
        "It accessed invalid memory: a bug in compiled code, or mixed library versions.",
    ),
    "SIGABRT": ("H11", "error", "A check in compiled code failed; the preceding lines show which."),
    "SIGFPE": ("H11", "error", "Compiled code divided an integer by zero."),
    "SIGILL": (
        "L10",
        "error",
        "This CPU does not support an instruction: with bf16 or fp16 on a virtual machine, usually AMX.",
    ),
    "SIGBUS": ("L11", "suspect", "Usually /dev/shm is full; `df` shows whether it is."),
}
FAULTHANDLER = "Run with python -X faulthandler to see the line."


@check("H11", "H19", "L10", "L11", source="log")
def died_of_a_signal(logs: Logs) -> Findings:
    root = blame(logs).crash
    if root is None or root.signal is None or root.signal == "SIGKILL":
        return
    crashed = {event.rank for event in blame(logs).roots if event.signal}
    everywhere = root.at is None and len(crashed) > 1 and crashed.issuperset(logs.ranks)
    if root.signal == "SIGSEGV" and (_is_in_ddp_constructor(root) or everywhere):
        why = f"DDP's constructor crashed{root.where}"
        if everywhere:
            why = f"All {len(crashed)} ranks died with SIGSEGV and without a traceback"
        why += ", as on gloo with TORCH_DISTRIBUTED_DEBUG=DETAIL. That is the cause if the job sets this variable."
        yield root.finding("H19", "suspect", why)
    if _is_in_ddp_constructor(root):
        return

    id, severity, meaning = CRASHES.get(
        root.signal, ("H11", "error", "Read the last lines it printed.")
    )
    who = root.who if len(crashed) == 1 else named(crashed)
    why = f"{who} died with {root.signal}{root.where}. {meaning}"
    rank = root.rank if len(crashed) == 1 and len(logs.ranks) > 1 else None
    words = [str(x) for x in logs.lines if "terminate called" in x.text or "what():" in x.text]
    evidence = (*words[:3], *root.evidence())
    yield root.finding(id, severity, why, FAULTHANDLER if id == "H11" else "", rank, evidence)


def _is_in_ddp_constructor(event: Event) -> bool:
    ddp = [frame for frame in event.frames if frame.file.endswith("nn/parallel/distributed.py")]
    innermost = event.frames[-1:] == ddp[-1:]
    return bool(ddp) and innermost and any(frame.function == "__init__" for frame in ddp)
