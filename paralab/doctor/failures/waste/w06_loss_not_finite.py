"""W06: The loss is not finite.

Symptom: The loss becomes NaN or infinite at some step and stays that way.
Cause: One step with non-finite gradients ruins every weight. The model cannot learn anything after that.
Fix: Stop immediately. Resume from the last checkpoint with a lower learning rate, with clipping, or
without the bad sample.

+ if not torch.isfinite(loss):
+     raise ValueError(f"the loss is {loss.item()} in step {step}")
  loss.backward()
  optimizer.step()
"""

from collections.abc import Sequence

from paralab.doctor.events import Amp, Backward
from paralab.doctor.failures.waste.timing import report_at
from paralab.doctor.observation import Observation
from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, Findings, check, describe

ENTRY = describe(__doc__)
FALLS = 3  # consecutive drops of the scale; with fewer, GradScaler is only searching for its scale
FIX = (
    "Find the first module with a non-finite output: use torch.autograd.set_detect_anomaly(True) "
    "for the backward pass, and a forward hook with torch.isfinite for the forward pass. Then "
    "lower the learning rate, clip, or use fp32 for that module."
)


def judge_losses(
    losses: Sequence[float | None], scales: Sequence[float], first: int = 0, unit: str = "step"
) -> Finding | None:
    """Report losses that stay non-finite. A loss is None if it is not finite. `scales` has
    GradScaler's scale in each step, if there is one. `first` is the number of the first step."""
    bad = next((number for number, loss in enumerate(losses) if loss is None), None)
    falls = falling(scales)
    if (bad is None and falls < FALLS) or (bad is not None and losses[-1] is not None):
        return None  # the loss recovered, so it was one bad batch
    lost = sum(loss is None for loss in losses)
    since = f"The loss is not finite from {unit} {first + (bad or 0)} on ({lost} of {len(losses)} {unit}s)"
    if not scales:
        why = f"{since}. By then every weight is ruined, and each further step is wasted."
        return Finding("W06", "error", why, FIX, evidence=(since,))
    skips = "GradScaler skips these steps"
    if falls:
        skips = (
            f"GradScaler's scale fell in each of the last {falls} steps, from {scales[-falls - 1]:g} "
            f"to {scales[-1]:g}"
        )
    shown = (since, skips) if bad is not None else ("The gradients are not finite", skips)
    why = f"{shown[0]}; {skips}. The model no longer learns."
    return Finding("A08", "error", why, FIX, evidence=shown if bad is not None else (skips,))


def falling(scales: Sequence[float]) -> int:
    """Count the consecutive drops at the end of the scales: 4, 8, 4, 2, 1 → 3."""
    count = 0
    while count + 1 < len(scales) and scales[-count - 1] < scales[-count - 2]:
        count += 1
    return count


@check_each_run("W06", "A08")
def loss_in_run(run: Run) -> Finding | None:
    steps = run.recording.named("optimizer", 0)
    scales = [event.scale for event in steps if event.scale is not None]
    return judge_losses(run.result.losses, scales, run.result.begun_at_step)


@check("W06", source="ranks")
def loss_on_ranks(seen: Observation) -> Findings:
    """Report non-finite losses if no GradScaler is used. With a GradScaler, A08 reports them."""
    for rank in seen.ranks if seen.over else ():
        passes = [event for event in rank.of(Backward) if event.loss is not None]
        losses = [event.loss if isinstance(event.loss, float | int) else None for event in passes]
        if len(losses) < 3 or any(event.enabled for event in rank.of(Amp)):
            continue
        finding = judge_losses(losses, [], unit="backward pass")
        if finding is not None:
            yield from report_at(passes[losses.index(None)].site, finding)
            return
