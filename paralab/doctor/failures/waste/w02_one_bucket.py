"""W02: One bucket, so nothing overlaps.

Symptom: DDP sends the gradients after the backward pass, not during it.
Cause: DDP sends a bucket when all its gradients are ready. A bucket that holds the whole model is ready at the very end.
Fix: Use smaller buckets: about four of them.

- model = DistributedDataParallel(model)  # 24 MB of gradients, buckets of 25 MB
+ model = DistributedDataParallel(model, bucket_cap_mb=6)
"""

from collections.abc import Sequence

from paralab.doctor.failures.waste.timing import (
    measured_windows,
    reductions,
    report_at,
    step_seconds,
)
from paralab.doctor.observation import Observation
from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.units import seconds, size

ENTRY = describe(__doc__)
WORTH = 0.05  # share of the step that a change should save
ONE_LARGE = 0.80  # if one bucket has this share of the bytes, overlapping the others saves little
SPLITTABLE_BYTES = 2**20  # smaller transfers are mostly latency, so two are slower than one
PARTS = 4  # buckets to aim for: enough to hide three quarters


def exposed_with(buckets: int, transfer: float, backward: float) -> float:
    """Return the smallest possible exposed time with equal buckets. The buckets become ready evenly
    over the backward pass and are sent one after another:

    backward 8, transfer 4, 4 buckets     |-- 2 --|-- 2 --|-- 2 --|-- 2 --|
                                                  |1|     |1|     |1|     |1|     exposed: the last one, 4 / 4 = 1
    backward 4, transfer 8, 4 buckets     |1|1|1|1|
                                            |- 2 -|- 2 -|- 2 -|- 2 -|             exposed: 8 - 4 · 3 / 4 = 5
    """
    return max(transfer / buckets, transfer - backward * (buckets - 1) / buckets)


def judge_buckets(
    sizes: Sequence[int], backward: float, transfer: float, exposed: float, step: float
) -> Finding | None:
    """Report buckets that cannot overlap. `sizes` are the bytes of each bucket."""
    total, largest = sum(sizes), max(sizes, default=0)
    if not (step and total and backward) or largest < max(SPLITTABLE_BYTES, ONE_LARGE * total):
        return None
    gain = (exposed - exposed_with(PARTS, transfer, backward)) / step
    if gain < WORTH:
        return None
    megabytes = max(1, round(total / PARTS / 2**20))
    share = f"one of {len(sizes)} buckets holds {largest / total:.0%} of the gradients"
    why = (
        f"Nothing overlaps: {share if len(sizes) > 1 else 'all gradients are in one bucket'} "
        f"({size(largest)}), which is ready only at the end of the backward pass "
        f"({seconds(backward)}). The all-reduce ({seconds(transfer)}) then blocks for "
        f"{seconds(exposed)}, {exposed / step:.0%} of the step."
    )
    fix = (
        f"Pass bucket_cap_mb={megabytes} to DDP (paralab: --bucket-mb {megabytes}). Of about {PARTS} buckets, "
        f"all but the last can be sent during the backward pass. This saves at most {gain:.0%} of the step."
    )
    return Finding("W02", "warning", why, fix, gain=gain)


@check_each_run("W02")
def one_bucket_in_run(run: Run) -> Finding | None:
    if run.plan.strategy != "ddp":
        return None
    sizes = [bucket.bytes for bucket in run.last_buckets]
    transfer = sum(bucket.transfer_seconds for bucket in run.last_buckets)
    # With accumulation, only the last backward pass has buckets to overlap with.
    backward = (run.metrics.backward_seconds or 0.0) / run.plan.accumulate
    exposed = min(run.metrics.exposed_communication_seconds or 0.0, transfer)
    return judge_buckets(sizes, backward, transfer, exposed, run.step_seconds)


@check("W02", source="ranks")
def one_bucket_on_ranks(seen: Observation) -> Findings:
    per_rank, reduced = measured_windows(seen), reductions(seen)
    if per_rank and reduced:
        times = (reduced.compute, reduced.transfer, reduced.exposed)
        finding = judge_buckets(reduced.sizes, *times, step_seconds(per_rank))
        yield from report_at(reduced.site, finding)
