"""A07: The scheduler steps although the scaler skipped the step.

Symptom: 'Detected call of lr_scheduler.step() before optimizer.step()', although the order in the code is correct.
Cause: The first fp16 steps often overflow. Then the scaler skips the optimizer step, but the scheduler still steps.
Fix: Step the scheduler only if the scale did not shrink.
Reported: Lightning-AI/pytorch-lightning#5558 #18828 pytorch/pytorch#44511 princeton-vl/RAFT#104

+ before = scaler.get_scale()
  scaler.step(optimizer)
  scaler.update()
- scheduler.step()
+ if scaler.get_scale() >= before:
+     scheduler.step()
"""

from paralab.doctor.events import Amp, Scheduled
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, describe, printed

ENTRY = describe(
    __doc__,
    printed(
        r"Detected call of `lr_scheduler\.step\(\)` before `optimizer\.step\(\)`",
        "The scheduler stepped before the optimizer{at}. With a GradScaler, the order in the "
        "script may be correct: the scaler skipped the first step. Without a GradScaler, the "
        "script has the two calls in the wrong order.",
        severity="suspect",
    ),
)


@check_each_rank("A07")
def scheduled_after_a_skip(rank: WatchedRank) -> Finding | None:
    skipped = False
    for event in rank.events:
        if isinstance(event, Amp) and event.op == "step":
            skipped = bool(event.skipped)
        elif isinstance(event, Scheduled) and skipped:
            why = (
                f"The scaler skipped step {event.step + 1} because its gradients overflowed, but the "
                "scheduler stepped anyway. The learning rate runs ahead of the optimizer."
            )
            return make_finding("A07", "warning", why, event)
    return None
