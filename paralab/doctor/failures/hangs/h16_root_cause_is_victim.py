"""H16: torchrun's 'Root Cause' names the victim.

Symptom: 'Root Cause (first observed failure)' shows a rank whose only error is a lost connection or a timeout.
Cause: torchrun reports the process that exited first: the one that waited, not the one that left or got stuck.
Fix: Keep one log per rank (--log-dir, --redirects=3), use `@record`, and look for the rank without an error.
Limits: Only logs show torchrun's report. When the doctor watches the ranks, it sees the culprit directly.
Reported: yangjianxin1/Firefly#171 xiuqhou/Salience-DETR#4 Facico/Chinese-Vicuna#113

- subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
+ subprocess.run(["torchrun", "--nproc_per_node=2", "--redirects=3", "--log-dir=logs", "train.py"])
"""

from paralab.doctor.logs.blame import blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.registry import Finding, Findings, check, describe

ENTRY = describe(__doc__)


@check("H16", source="log")
def torchrun_names_the_victim(logs: Logs) -> Findings:
    accused, found = next((exit_ for exit_ in logs.exits if exit_.first), None), blame(logs)
    if accused is None or any(event.rank is None for event in found.roots):
        return
    victims = [event for event in found.victims if event.rank == accused.rank]
    own = [event for event in (*found.roots, *found.unknown) if event.rank == accused.rank]
    if own or not victims or victims[0].exit:
        return
    if not found.roots and (victims[0].alone is not False or not found.absent):
        return  # this rank may have called a collective alone, so torchrun may be right
    suspects = [found.roots[0].rank] if found.roots else list(found.absent)
    culprit = suspects[0] if len(suspects) == 1 else None
    look = "a rank that left no error" if culprit is None else f"rank {culprit}"
    why = (
        f"torchrun calls rank {accused.rank} the root cause because it exited first. That rank only "
        f"noticed that another one was gone or late. Check {look}."
    )
    evidence = (str(accused.line), *victims[0].evidence()[-1:])
    yield Finding("H16", "warning", why, rank=culprit, evidence=evidence)
