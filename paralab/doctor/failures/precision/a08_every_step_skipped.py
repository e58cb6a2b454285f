"""A08: The scaler skips every step because the loss is NaN.

Symptom: Training seems to run, but the model learns nothing and the scale halves in every step.
Cause: The model itself produces NaN. The scaler treats it as an overflow, skips the step, and halves the scale, forever.
Fix: Find the first module that returns NaN (anomaly detection, hooks): often a logarithm or square
root of zero, or a division by zero.

  scaler.step(optimizer)
  scaler.update()
+ if scaler.get_scale() < 1:
+     raise RuntimeError("gradients are not finite at any scale: look for NaN in forward")
"""

from paralab.doctor.events import Amp, Backward
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, describe

ENTRY = describe(__doc__)

FEW_SKIPS = 3  # consecutive skips to report if the loss is also NaN
MANY_SKIPS = 12  # consecutive skips to report for any loss; the scale has fallen from 65536 to 16


@check_each_rank("A08")
def always_skipped(rank: WatchedRank) -> Finding | None:
    skips, lost, first = 0, 0, None
    for event in rank.events:
        if isinstance(event, Backward) and event.loss is not None:
            lost = lost + 1 if isinstance(event.loss, str) else 0
            first = event if lost == 1 else first
        elif isinstance(event, Amp) and event.op == "step" and event.enabled:
            skips = skips + 1 if event.skipped else 0
    if (skips < FEW_SKIPS or lost < FEW_SKIPS) and skips < MANY_SKIPS:
        return None
    first = first if lost >= FEW_SKIPS else None
    cause = f"the loss is {first.loss}" if first else "the gradients are never finite"
    why = (
        f"The scaler skipped the last {skips} steps in a row because {cause}. The script keeps "
        "running, but the model learns nothing."
    )
    scales = [event.scale for event in rank.of(Amp) if event.op == "update" and event.scale]
    evidence = f"rank {rank.rank}: scale {' '.join(f'{scale:g}' for scale in scales[-5:])}"
    return make_finding("A08", "error", why, first, evidence)
