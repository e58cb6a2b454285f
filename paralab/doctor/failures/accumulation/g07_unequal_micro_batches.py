"""G07: micro-batches of different size count the same."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.agreement import found, place_of
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.registry import Entry, check
from paralab.doctor.windows import accumulated, are_weighted_by

ENTRY = Entry(
    id="G07",
    title="Micro-batches of different sizes count the same",
    symptom="No message. The gradient differs from that of the large batch (19 % off for micro-batches of 3, 3, and 2 samples).",
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


@check("G07", source="ranks")
def unequal_sizes(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        for window in accumulated(rank):
            known = [one.size for one in window.micro_steps if one.size is not None]
            means = all(
                {loss.reduction for loss in one.losses if loss.grad} == {"mean"}
                for one in window.micro_steps
            )
            if len(known) < len(window.micro_steps) or len(set(known)) < 2 or not means:
                continue
            if are_weighted_by(window.micro_steps, known):
                continue
            small, mean = min(known), sum(known) / len(known)
            why = (
                f"One step adds up micro-batches of {', '.join(map(str, known))} samples, each as a mean over its own "
                f"samples. A sample in the batch of {small} counts {mean / small:.2f} times as much as it should."
            )
            fix = "Use `drop_last=True`, or weight each loss: `loss * len(batch) / samples_of_the_step`."
            number = window.step.number if window.step else "?"
            evidence = f"rank {rank.rank}, step {number}: sizes {known}"
            yield found(
                "G07", "warning", why, fix, place_of(window.micro_steps[0].backward), [evidence]
            )
            return
