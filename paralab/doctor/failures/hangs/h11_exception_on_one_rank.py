"""H11: An exception on one rank stopped the job.

Symptom: One rank has a Python traceback. The others report 'Connection closed by peer' (gloo) or hang (NCCL).
Cause: One rank failed: a bad sample, a failed assertion, a full GPU. The other errors are consequences.
Fix: Fix the first error that is not a lost connection. `@record` makes torchrun print it.

+ from torch.distributed.elastic.multiprocessing.errors import record
+
+
+ @record
  def main():
      train()


  main()
"""

from dataclasses import replace

from paralab.doctor.logs.blame import Event, blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.line import Line
from paralab.doctor.logs.reading import MENTIONED
from paralab.doctor.messages import explains, find_message, messages_in, named
from paralab.doctor.registry import Findings, Message, Severity, check, describe, printed
from paralab.record.victims import WAITED, is_victim

LESS_MEMORY = "Use a smaller batch per rank with gradient accumulation, autocast, or activation checkpointing."
FIRST_CUDA_ERROR = "Run with NCCL_DEBUG=INFO and look for this rank's first CUDA error."
NO_MEMORY = (
    "{who} could not allocate any GPU memory{at}. Other processes may use the same GPU: a "
    "leftover job, or ranks that all use GPU 0.",
    f"nvidia-smi shows which processes use the memory. {LESS_MEMORY}",
)
ENTRY = describe(
    __doc__,
    Message(
        r"CUDA out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)",
        "{who} ran out of GPU memory{at}: it tried to allocate {asked}.",
        fix=LESS_MEMORY,
    ),
    Message(r"CUDA error: out of memory|Cuda failure \d*\s*'out of memory'", *NO_MEMORY),
    printed(r"NCCL WARN Cuda failure \d*\s*'out of memory'", *NO_MEMORY),
    Message(
        r"NVIDIA driver on your system is too old(?: \(found version (?P<version>\d+)\))?"
        r"|driver version is insufficient for CUDA runtime",
        "The NVIDIA driver on this machine is too old for this build of torch{at}. The "
        "training code is not the cause.",
        fix="Update the driver, or install a torch build for an older CUDA version.",
    ),
    Message(
        r"No inf checks were recorded for this optimizer",
        "{who} called scaler.step(optimizer){at}, and no parameter of that optimizer has a gradient. "
        "The loss does not depend on them, they are frozen, or backward did not run.",
        fix="Print `[n for n, p in model.named_parameters() if p.grad is not None]` before the step.",
    ),
    Message(
        r"element \d+ of tensors does not require grad",
        "{who} called backward{at} on a loss that does not depend on any trainable parameter: all "
        "parameters are frozen, the loss was detached, or reentrant activation checkpointing got inputs without requires_grad.",
        fix="Check requires_grad of the parameters. For checkpointing, pass use_reentrant=False.",
    ),
    Message(
        r"Tensors must be CUDA and dense|No backend type associated with device type cpu",
        "{who} gave NCCL a tensor that is not on a GPU, or is sparse{at}. A model and all its "
        "buffers must be on the GPU before DDP wraps it.",
        fix="Move the model or the tensor to the rank's GPU first, or use gloo for CPU tensors.",
    ),
    Message(
        r"(?:Must flatten tensors with|`?FlatParameter`? requires) uniform (?P<what>\w+)",
        "FSDP stores the parameters of one wrapped module in one tensor{at}, so they need the same "
        "{what}. Here they differ, for example because of adapters (LoRA) next to a model in "
        "lower precision.",
        fix="Convert the parameters, pass use_orig_params=True, or wrap the parts separately.",
    ),
    printed(
        r"NVRM: Xid \([^)]*\): (?P<xid>\d+)(?:, pid='?(?P<pid>\d+))?|CUDA error: .{0,40}ncorrectable ECC"
        r"|ncorrectable ECC error encountered",
        "The driver reports a hardware error (Xid {xid}, or ECC) on the GPU of {who}.",
        fix="Exclude this GPU or node and tell its administrator; `nvidia-smi -q` shows the counters.",
    ),
    Message(
        r"device-side assert",
        "A check inside a GPU kernel failed on {who}{at}, usually because a class or token number "
        "is out of range. The traceback shows where the failure was noticed, not where it happened.",
        fix="CUDA_LAUNCH_BLOCKING=1 shows the right line. Compare the largest label with the number "
        "of classes.",
    ),
    Message(
        r"illegal memory access",
        "A GPU kernel on {who} accessed memory out of bounds{at}. The traceback shows where "
        "the failure was noticed, not where it happened.",
        fix="CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer shows the kernel.",
    ),
    printed(
        r"NCCL_SOCKET_IFNAME set by environment to (?P<name>\S+)",
        "NCCL cannot use the network interface {name}, which NCCL_SOCKET_IFNAME names.",
        fix="Set NCCL_SOCKET_IFNAME to an interface that `ip addr` lists on every node, or unset it.",
        blames=False,
        beside=r"ncclInternalError|ncclSystemError|is neither AF_INET|no socket interface found",
    ),
    printed(
        r"ncclSystemError|unhandled system error|ncclSocketInit|with error 12, opcode|IBV_WC_RETRY_EXC_ERR"
        r"|transport retry counter exceeded",
        "NCCL reports a system error on {who}{at}: a problem with the network, the driver, or the "
        "machine, not with the training code.",
        fix="Run with NCCL_DEBUG=INFO and read NCCL's first WARN line. Check the interface "
        "(NCCL_SOCKET_IFNAME), the InfiniBand links, and /dev/shm.",
    ),
    printed(
        r"(?:ncclUnhandledCudaError|unhandled cuda error|NCCL WARN)(?:.*Cuda failure \d* ?'(?P<what>[^']+)')",
        "A CUDA call inside NCCL failed on {who}{at}: {what}. The GPU had already failed, or the "
        "driver version does not match.",
        fix=FIRST_CUDA_ERROR,
    ),
    printed(
        r"ncclUnhandledCudaError|unhandled cuda error|NCCL WARN Cuda failure",
        "A CUDA call inside NCCL failed on {who}{at}: the GPU had already failed, or the driver "
        "does not match.",
        fix=FIRST_CUDA_ERROR,
    ),
    printed(
        r"unrecognized arguments: --local[-_]rank",
        "torch.distributed.launch passes --local-rank to the script, which does not accept it.",
        fix='Start with torchrun and read int(os.environ["LOCAL_RANK"]).',
    ),
)

LOST = "lost its connection to another rank"
OTHER_LOGS = "Pass the logs of all ranks: torchrun --log-dir=logs --redirects=3, then paralab doctor job.log logs."
LAST = 8  # number of lines to show


@check("H11", source="log")
def known_message(logs: Logs) -> Findings:
    yield from messages_in(logs)


@check("H11", source="log")
def other_exception(logs: Logs) -> Findings:
    roots = blame(logs).roots
    root = roots[0] if roots else None
    if root is None or root.trace is None or root.signal or explains(logs, root):
        return
    if "NCCL error" in root.trace.error and explains(logs):
        return  # NCCL's own lines are more specific
    same = [e for e in roots if e.trace and e.trace.kind == root.trace.kind and e.at == root.at]
    ranks = {event.rank for event in same}
    later = {event.rank for event in blame(logs).victims} - ranks - {None}
    why = f"{named(ranks)} raised `{root.trace.headline[:300]}`{root.where}."
    if later:
        why += f" Later errors on {named(later).lower()} are consequences."
    fix = "Fix this exception first." if root.at else f"Fix this exception first. {OTHER_LOGS}"
    rank = root.rank if len(same) == 1 and len(logs.ranks) > 1 else None
    yield root.finding("H11", "error", why, fix, rank)


@check("H11", source="log")
def unexplained(logs: Logs) -> Findings:
    """Report an exit code, a lost connection, or the last lines if nothing explains them."""
    found = blame(logs)
    codes = [event for event in found.unknown if event.exit and event.exit.code != -2]
    if found.roots or explains(logs):
        return
    if codes:
        first = next((event for event in codes if event.exit and event.exit.first), codes[0])
        assert first.exit is not None
        code = first.exit.signal or f"code {first.exit.code}"
        # The other ranks' messages are in this log, so this rank's message would be here too.
        own = len(logs.sources) == 1 and bool(found.victims) and (first.exit.code or 0) > 1
        why = f"{named([first.rank])} exited with {code} and printed no exception"
        why += (
            "; the other ranks lost their connection to it."
            if own
            else " here. It may be the cause or a victim."
        )
        fix = "Look for sys.exit and os._exit in this rank's code." if own else OTHER_LOGS
        severity: Severity = "error" if own else "suspect"
        yield first.finding("H11", severity, why, fix, first.rank if own else None)
        return
    victim = found.victims[0] if found.victims else _last_victim(logs)
    if victim is None:
        yield from _last_words(logs)
        return
    if found.victims:
        known = victim.rank is not None or found.absent or (victim.waited and victim.at)
        if known or logs.exits or explains(logs, victim):
            return  # waiting.py explains it
    what = "waited for another rank until its timeout" if victim.waited else LOST
    why = f"{named([victim.rank])} {what}{victim.where}. It is a victim of another rank."
    yield victim.finding("H11", "suspect", why, OTHER_LOGS)


def _last_lines(logs: Logs) -> list[Line]:
    return [line for line in logs.lines if line.number > logs.lengths.get(line.source, 0) - LAST]


def _last_victim(logs: Logs) -> Event | None:
    """Return the victim's message at the end of the log, if the script caught the exception."""
    for line in _last_lines(logs):
        if not line.stamped and is_victim(line.text, line.text):
            mentioned = MENTIONED.search(line.text)
            rank = line.rank if line.rank is not None or not mentioned else int(mentioned[1])
            return Event("victim", rank, line, waited=bool(WAITED.search(line.text)))
    return None


def _last_words(logs: Logs) -> Findings:
    """Report a log that is cut off inside a traceback, or after a known message but before its
    exception."""
    ends = _last_lines(logs)
    known = find_message("\n".join(line.text for line in ends), ("raised",), logs.lines)
    if known and known.message.why and not any(line.stamped for line in ends):
        found = known.finding([None], None, None, tuple(map(str, ends[:3])))
        yield replace(found, severity="suspect")
        return
    for trace in logs.tracebacks:
        if trace.where and not (trace.errors or trace.of_launcher) and trace.followed <= 3:
            event = Event("unknown", trace.rank, trace.lines[-1], trace)
            why = f"The log ends inside a traceback of {named([trace.rank]).lower()}{event.where}. "
            why += "The exception itself is missing."
            fix = "Pass the complete log, or the lines after the traceback."
            yield event.finding("H11", "suspect", why, fix)
            return
