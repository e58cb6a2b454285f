"""W03: One rank is slower than the others.

Symptom: Every rank waits for the slowest one, so the other devices idle in each step.
Cause: One rank has more or longer samples, logs or saves inside the step, shares a core, or has a slower or hotter device.
Fix: Find out what extra work this rank does. Give every rank the same work, and log and save outside the step.

  for batch in loader:
      step(batch)
-     if rank == 0:
-         write_pictures(model)
+ if rank == 0:
+     write_pictures(model)
"""

import statistics
from collections import Counter

from paralab.analyse.metrics import LATE_STEPS, RULE
from paralab.doctor.events import Backward, Collective
from paralab.doctor.failures.waste.timing import FEWEST, Window, measured_windows, step_seconds
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.units import seconds

ENTRY = describe(__doc__)
BY_CHANCE = 0.20  # share of the step by which a busy machine can delay a rank
SLICE_SECONDS = 0.005  # the operating system may delay a rank by up to one time slice
ENOUGH_STEPS = 6  # steps needed to conclude that a rank is always last
ALWAYS = 0.90


def judge_straggler(rank: int, waited: float, step: float, last_in: int, of: int) -> Finding | None:
    """Report a rank that the others wait for in step after step."""
    if not step or waited < max(RULE * step, SLICE_SECONDS):
        return None
    share = waited / step
    sure = share >= BY_CHANCE and waited >= 2 * SLICE_SECONDS
    sure = sure and of >= ENOUGH_STEPS and last_in >= ALWAYS * of
    why = (
        f"Rank {rank} arrives last in {last_in} of {of} steps, and another rank waits "
        f"{seconds(waited)} for it in every step ({share:.0%})."
    )
    doubt = (
        ""
        if sure
        else "if a longer run shows the same rank, because a busy machine can also delay a rank"
    )
    return make_finding("W03", "warning", why, None, (), rank, doubt=doubt, gain=share)


@check_each_run("W03")
def straggler_in_run(run: Run) -> Finding | None:
    late = run.metrics.straggler
    if late is None or run.is_crowded:  # ranks that share cores take turns being last (L09)
        return None
    times = (late.waited_seconds, run.step_seconds)
    return judge_straggler(late.rank, *times, late.last_in, late.of)


@check("W03", source="ranks")
def straggler_on_ranks(seen: Observation) -> Findings:
    """Report a rank that always synchronizes last. Skip multiple machines: their clocks differ."""
    per_rank = measured_windows(seen)
    if len(per_rank) < 2 or len({rank.start.host for rank in seen.ranks}) > 1:
        return
    rounds = [
        [time for time in round_ if time is not None]
        for round_ in zip(
            *([_arrival(window) for window in rank] for rank in per_rank), strict=True
        )
        if None not in round_
    ]
    if len(rounds) < FEWEST:
        return
    last = Counter(round_.index(max(round_)) for round_ in rounds)
    place, count = last.most_common(1)[0]
    waits = [round_[place] - min(round_[:place] + round_[place + 1 :]) for round_ in rounds]
    if count >= LATE_STEPS * len(rounds):
        times = (statistics.median(waits), step_seconds(per_rank))
        finding = judge_straggler(seen.ranks[place].rank, *times, count, len(rounds))
        yield from [finding] if finding else []


def _arrival(window: Window) -> float | None:
    """Return when a rank reached its first synchronization: DDP's backward, or a collective."""
    for event in window.events:
        seq = event.seq if isinstance(event, (Backward, Collective)) else None
        if seq and (isinstance(event, Collective) or seq[1] >= seq[0]):
            return event.t
    return None
