"""H10: Ranks wait in a collective until it times out.

Symptom: 'Watchdog caught collective operation timeout: WorkNCCL(SeqNum=…, OpType=…)' on every rank that waited.
Cause: One rank did not reach a collective. Only the ranks that waited print this, and it does not name the missing rank.
Fix: Compare 'last enqueued' on all ranks, and check the rank with the smallest number. Turn on the Flight Recorder.
Limits: In logs, only with NCCL. On gloo, the doctor observes the hang itself.
Reported: pytorch/pytorch#118369 XPixelGroup/BasicSR#737 hiyouga/LlamaFactory#7396
NVIDIA/Megatron-LM#1207 meta-llama/llama-cookbook#65

- subprocess.run(["torchrun", "--nproc_per_node=8", "train.py"])
+ recorder = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
+ command = ["torchrun", "--nproc_per_node=8", "--redirects=3", "--log-dir=logs", "train.py"]
+ subprocess.run(command, env={**os.environ, **recorder})
"""

from paralab.analyse.collective_matching import CollectiveCall, find_mismatches
from paralab.doctor.failures.hangs.recorder import explain_mismatch
from paralab.doctor.logs.blame import blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.watchdog import Waiting, waiting_ranks
from paralab.doctor.messages import explains, named
from paralab.doctor.registry import Finding, Findings, Severity, check, describe
from paralab.units import seconds

ENTRY = describe(__doc__)

RECORD = (
    "Compare the last lines of all ranks. Next time set TORCH_FR_BUFFER_SIZE=2000 and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, which record the collectives of every rank."
)


@check("H10", "H04", "H06", "H07", "H15", source="log")
def collective_timed_out(logs: Logs) -> Findings:
    """Report which rank is missing. The watchdog names the ranks that waited; the missing rank has
    enqueued fewer collectives in the same group."""
    found = blame(logs)
    if found.roots or explains(logs):
        return  # one rank failed on its own, and the others waited for it
    everybody = waiting_ranks(logs)
    timed = [item for item in everybody if item.call]
    if not timed:
        if any("dump signal" in line.text for line in logs.lines) and everybody:
            yield _elsewhere(logs, everybody)
        return
    group = [item for item in everybody if item.group == timed[0].group]
    number = min(item.number for item in group if item.call)
    yield _compare(logs, group, number, len({item.group for item in everybody}) == 1)


def _elsewhere(logs: Logs, everybody: list[Waiting]) -> Finding:
    """Report a timeout outside the default group. Its ranks only log that they dump their state."""
    pending = [item for item in everybody if item.enqueued != item.completed]
    why = "A collective timed out, and these ranks only report that they are dumping their state. "
    if not pending:
        why += "Nothing is pending in the groups shown: the collective belongs to another group. "
    else:
        first = min((item.completed or 0) + 1 for item in pending)
        why += f"{named(item.rank for item in pending)} did not finish collective {first}. "
        rest = {line.rank for line in logs.lines} - {item.rank for item in pending} - {None}
        report = "reports" if len(rest) == 1 else "report"
        why += f"{named(rest)} {report} no pending collective: check there first. " if rest else ""
    why += "The logs of all ranks would confirm this."
    return Finding("H10", "suspect", why, RECORD, evidence=_evidence(everybody))


def _evidence(items: list[Waiting]) -> tuple[str, ...]:
    return tuple(str(line) for item in items for line in item.lines)[:4]


def _compare(logs: Logs, group: list[Waiting], number: int, whole: bool) -> Finding:
    """Compare what all ranks in a group report about the collective that timed out first. Ranks
    that wait in a collective with a different number are only mentioned."""
    same = [item for item in group if item.number == number]
    first, evidence = same[0], _evidence(group)
    ranks = {x.rank: _last_collective(x, number) for x in group if x in same or not x.call}
    found = find_mismatches({r: [c] for r, c in ranks.items() if r is not None and c}, over=True)
    mismatch = found[0] if found else None
    if mismatch and mismatch.kind in ("operation", "size"):
        return explain_mismatch(mismatch, evidence)

    waited = seconds(first.timeout_seconds)
    why = f"{named(item.rank for item in same)} waited {waited} in {first}. "
    for item in group:
        if item.call and item not in same:
            why += f"{named([item.rank])} waited in {item}. "
    aborted = {exit_.rank for exit_ in logs.exits if exit_.code == -6}  # watchdogs abort with -6
    silent = set(logs.ranks) - {item.rank for item in group} - aborted
    if mismatch and mismatch.kind == "behind" and mismatch.odd is not None and not silent:
        enqueued = next(item.enqueued for item in group if item.rank == mismatch.odd)
        why += f"Rank {mismatch.odd} had enqueued only {enqueued}: it never arrived. "
        return _h10(first, why, mismatch.odd, len(same) > 1, evidence)
    late = mismatch is not None and mismatch.kind == "behind"
    if whole and len(silent) == 1 and silent <= logs.heard and len(same) > 1 and not late:
        (rank,) = silent
        why += f"Rank {rank} reports no timeout: it never arrived. "
        return _h10(first, why, rank, bool(logs.exits), evidence)
    if mismatch and mismatch.kind == "stuck" and not silent and len(ranks) == len(group):
        why += (
            "Every rank in this log has enqueued it. No rank is missing, so the connection is "
            "broken. "
        )
        why += "This is certain if the job works with NCCL_P2P_DISABLE=1."
        return Finding("H15", "suspect", why, evidence=evidence)
    if first.call and first.call.kind == "broadcast" and first.values >= 64 and number > 4:
        # Only one rank waits, and the launcher recorded the exits of the others.
        alone = len(same) == 1 and len(logs.ranks) > 2 and bool(logs.exits) and len(aborted) <= 1
        why += (
            "A broadcast in the middle of training may be DDP's copy of the buffers. Then one "
            "rank calls the model alone, for example in an evaluation under `if rank == 0`."
        )
        caller = same[0].rank if alone else None
        return Finding("H07", "suspect", why, rank=caller, evidence=evidence)
    why += "The log does not show which rank is missing. "
    unheard = silent - logs.heard
    if len(unheard) > 3:
        why += "Most ranks printed nothing here. Pass their logs too. "
    elif unheard:
        why += f"The log has no line from {named(unheard).lower()}: check there first. "
    return _h10(first, why, None, False, evidence)


def _last_collective(item: Waiting, number: int) -> CollectiveCall | None:
    """Return the collective that timed out, or the number that the rank had reached."""
    if item.call is not None or item.enqueued is None:
        return item.call
    came = item.enqueued >= number
    return CollectiveCall(None, item.group, min(item.enqueued, number), is_open=came)


def _h10(
    first: Waiting, why: str, rank: int | None, certain: bool, evidence: tuple[str, ...]
) -> Finding:
    if first.call and first.call.kind == "all_reduce" and first.values > 64:
        why += "This is a bucket of gradients: the missing rank had fewer batches, left the loop, or failed."
    elif first.values == 1:
        why += "A collective of one value is a barrier or a metric, not a gradient."
    severity: Severity = "error" if certain else "suspect"
    return Finding("H10", severity, why.strip(), RECORD, rank=rank, evidence=evidence)
