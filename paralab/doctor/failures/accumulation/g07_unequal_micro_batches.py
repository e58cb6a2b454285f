"""G07: Micro-batches of different sizes get the same weight.

Symptom: No error. The gradient differs from that of the whole batch (by 19% for micro-batches of 3, 3, and 2 samples).
Cause: Averaging the means of the micro-batches gives more weight to samples in small ones.
Fix: Weight each loss by the size of its micro-batch, `loss * len(x) / samples`, or use drop_last=True.
Reported: Lightning-AI/pytorch-lightning#19987

+ samples = sum(len(x) for x, _ in micro_batches)
  for x, y in micro_batches:
-     loss = criterion(model(x), y) / len(micro_batches)
+     loss = criterion(model(x), y) * len(x) / samples
      loss.backward()
"""

from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, describe
from paralab.doctor.windows import accumulated, are_weighted_by

ENTRY = describe(__doc__, silent=True)


@check_each_rank("G07")
def unequal_sizes(rank: WatchedRank) -> Finding | None:
    for window in accumulated(rank):
        passes = window.micro_steps
        known = [one.size for one in passes if one.size is not None]
        if len(known) < len(passes) or len(set(known)) < 2 or not all(p.is_mean for p in passes):
            continue
        if are_weighted_by(passes, known):
            continue
        small, mean = min(known), sum(known) / len(known)
        why = (
            f"One step adds up the mean losses of {', '.join(map(str, known))} samples. A sample in the "
            f"micro-batch of {small} counts {mean / small:.2f} times as much as it should."
        )
        return make_finding("G07", "warning", why, passes[0].backward)
    return None
