"""Flight Recorder dumps of several ranks, laid side by side."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.analyse.collective_matching import CollectiveCall, Mismatch, find_mismatches
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.said import tells

IDS = {
    "behind": "H01",
    "operation": "H04",
    "groups": "H04",
    "size": "H06",
    "site": "H05",
    "stuck": "H15",
}
FIXES = {
    "behind": "let every rank make the same number of steps (DistributedSampler with drop_last=True), and call "
    "collectives on all ranks",
    "operation": "the same collectives in the same order on all ranks: no rank condition around them",
    "groups": "the same order of groups on all ranks",
    "size": "the same shape on all ranks: pad to the largest, all_gather_object, or drop_last=True",
    "site": "the same order on all ranks, or one packed tensor for both values",
    "stuck": "try NCCL_P2P_DISABLE=1; check the network interface that was chosen (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)",
}


@tells("H01", "H03", "H04", "H05", "H06", "H15")
def dumps_differ(logs: Logs) -> Iterator[Finding]:
    """H01 or H03 (a rank is behind), H04, H05, H06, H15. The first place where the ranks part; what
    follows is its consequence."""
    for mismatch in find_mismatches(logs.dumps, over=True)[:1]:
        yield _told(logs, mismatch)


def _told(logs: Logs, mismatch: Mismatch) -> Finding:
    calls = mismatch.came
    site = next((call.where for _, call in calls if call.where), None)
    file, _, line = site.rpartition(":") if site else ("", "", "")
    id, severity = IDS[mismatch.kind], _severity(mismatch)
    rank = mismatch.odd
    if mismatch.kind == "behind" and not any(_is_gradient(call) for _, call in calls):
        id = "H03"
        rank = _who(mismatch)
    evidence = tuple(
        f"{logs.dump_names[rank]}: rank {rank}, collective {mismatch.number}: {_named(call) if call else 'not called'}"
        for rank, call in mismatch.calls.items()
    )
    return Finding(
        id,
        severity,
        _why(mismatch),
        FIXES[mismatch.kind],
        file or None,
        int(line) if line.isdigit() else None,
        rank,
        evidence,
    )


def _who(mismatch: Mismatch) -> int | None:
    """Of a call that is not a gradient: most came, and one is missing; or one came, and calls it
    alone. Of two, either may be."""
    if len(mismatch.calls) < 3:
        return None
    return mismatch.odd if len(mismatch.came) > 1 else mismatch.came[0][0]


def _named(call: CollectiveCall) -> str:
    return f"{call} at {call.where}" if call.where else str(call)


def _severity(mismatch: Mismatch) -> Severity:
    certain = mismatch.kind in ("operation", "groups", "size") or mismatch.swapped
    return "error" if certain else "suspect"


def _is_gradient(call: CollectiveCall) -> bool:
    return call.kind == "all_reduce" and (call.values or 0) > 64


def _why(mismatch: Mismatch) -> str:
    said = "; ".join(f"rank {rank} calls {_named(call)}" for rank, call in mismatch.came)
    number = f"collective {mismatch.number} of group {mismatch.group}"
    if mismatch.kind == "behind":
        who = f"rank {mismatch.odd}" if mismatch.odd is not None else "several ranks"
        before = mismatch.last[mismatch.behind[0]]
        last = f"; the last thing it did was {_named(before)}" if before else ""
        return f"At {number} {said}, and {who} did not come{last}. Certain with the line where that rank stood."
    if mismatch.kind == "stuck":
        return f"At {number} all ranks have arrived ({said}) and it does not end: the network or P2P. Certain if nccl-tests hangs too."
    odd = f" Rank {mismatch.odd} differs from all others." if mismatch.odd is not None else ""
    if mismatch.kind == "site":
        certain = (
            "" if mismatch.swapped else " Certain if the two lines do not reduce the same value."
        )
        return f"At {number} {said}: operation and size agree, so nothing fails, and the sums mix two values.{odd}{certain}"
    return f"At {number} {said}: collectives meet by their order, not by their name.{odd}"
