"""Compare Flight Recorder dumps of several ranks. Only the first mismatch matters; later ones
follow from it."""

from collections.abc import Iterable

from paralab.analyse.collective_matching import CollectiveCall, Mismatch, find_mismatches
from paralab.doctor.logs.job import Logs
from paralab.doctor.registry import Finding, Findings, Severity, check

# The id for each kind of difference, and whether the difference alone proves it
IDS = {
    **{"operation": ("H04", True), "groups": ("H04", True), "size": ("H06", True)},
    **{"behind": ("H01", False), "site": ("H05", False), "stuck": ("H15", False)},
}


@check("H01", "H03", "H04", "H05", "H06", "H15", source="log")
def dumps_differ(logs: Logs) -> Findings:
    for mismatch in find_mismatches(logs.dumps, over=True)[:1]:
        yield explain_mismatch(
            mismatch,
            (
                f"{logs.dump_names[rank]}: rank {rank}, collective {mismatch.number}: {_named(call)}"
                for rank, call in mismatch.calls.items()
            ),
        )


def explain_mismatch(mismatch: Mismatch, evidence: Iterable[str]) -> Finding:
    (id, certain), rank = IDS[mismatch.kind], mismatch.odd
    gradient = any(c.kind == "all_reduce" and (c.values or 0) > 64 for _, c in mismatch.came)
    if mismatch.kind == "behind" and not gradient:
        # With three or more ranks, blame the only one that is missing or the only one that arrived.
        id, rank = "H03", rank if len(mismatch.came) > 1 else mismatch.came[0][0]
        rank = rank if len(mismatch.calls) > 2 else None
    site = next((call.where for _, call in mismatch.came if call.where), None) or ""
    file, _, line = site.rpartition(":")
    severity: Severity = "error" if certain or mismatch.swapped else "suspect"
    number = int(line) if line.isdigit() else None
    return Finding(id, severity, _why(mismatch), "", file or None, number, rank, tuple(evidence))


def _named(call: CollectiveCall | None) -> str:
    if call is None:
        return "not called"
    return f"{call} at {call.where}" if call.where else str(call)


def _why(mismatch: Mismatch) -> str:
    calls = "; ".join(f"rank {rank} calls {_named(call)}" for rank, call in mismatch.came)
    why = f"At collective {mismatch.number} of group {mismatch.group}: {calls}. "
    if mismatch.kind == "behind":
        who = f"Rank {mismatch.odd}" if mismatch.odd is not None else "Multiple ranks"
        before = mismatch.last[mismatch.behind[0]]
        last = f" after {_named(before)}" if before else ""
        return f"{why}{who} never arrived{last}. A stack of that rank would confirm this."
    if mismatch.kind == "stuck":
        return (
            f"{why}All ranks arrived, but the collective does not finish: the network or P2P access "
            "is broken."
        )
    if mismatch.kind == "site":
        why += "The operation and size match, so nothing fails, but the sums mix two values."
        certain = " This is certain if the two lines reduce different values."
        return why if mismatch.swapped else why + certain
    return f"{why}Ranks match collectives by their order, not by name."
