"""G07: micro-batches of different sizes get the same weight."""

from __future__ import annotations

from paralab.doctor.finding import Finding
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Entry
from paralab.doctor.windows import accumulated, are_weighted_by

ENTRY = Entry(
    id="G07",
    title="Micro-batches of different sizes count the same",
    symptom="No message. The gradient differs from that of the whole batch (19 % off for micro-batches of 3, 3, and 2 samples).",
    cause="A mean of means gives more weight to the samples of a small micro-batch.",
    fix="Weight each micro-batch by its number of samples, or drop the smaller one.",
    example="""\
+ samples = sum(len(x) for x, _ in micro_batches)
  for x, y in micro_batches:
-     loss = criterion(model(x), y) / len(micro_batches)
+     loss = criterion(model(x), y) * len(x) / samples
      loss.backward()
""",
    sources=("Lightning-AI/pytorch-lightning#19987",),
    silent=True,
)


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
            f"One step adds up micro-batches of {', '.join(map(str, known))} samples, each as a mean "
            f"over its own samples. A sample in the batch of {small} counts {mean / small:.2f} times as "
            "much as it should."
        )
        fix = (
            "Use `drop_last=True`, or weight each loss: `loss * len(batch) / samples_of_the_step`."
        )
        number = window.step.number if window.step else "?"
        evidence = f"rank {rank.rank}, step {number}: sizes {known}"
        return make_finding("G07", "warning", why, passes[0].backward, evidence, fix=fix)
    return None
