"""Estimate how much memory a plan needs, whether it fits a device, and the largest batch that fits.

A trial with fake tensors gives the numbers (`paralab.worker.inspection.memory_trial`), and
`paralab.plan.estimate` divides them among the devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from paralab.errors import UsageError
from paralab.experiment.planning import resolve_here
from paralab.launch.inspect import Inspected, try_memory
from paralab.plan.estimate import estimate, find_unsupported, micro_batch_sizes
from paralab.plan.memory_trial import Fit, Kind, MemoryEstimate, MemoryTrial, kind_of
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.units import size

MOST_SAMPLES = 2**24  # samples in a batch, if the data is endless
MOST_TRIALS = 8  # trials of other batch sizes
TOO_LARGE = (
    "the model does not fit this machine, so paralab inspected it with fake tensors: it timed no "
    "layers, and may miss differences from a single device"
)
NO_PEAK = "nn.DataParallel's copies on each device are not part of the trial"


def with_memory(plan: Plan) -> Plan:
    """Return the plan with an estimate of its memory, or with the reason why there is none."""
    return replace(plan, memory=_estimate(plan, _try(plan)))


def with_fit(request: Request, inspected: Inspected, plan: Plan, given: int | None) -> Plan:
    """Return the plan with an estimate, and whether it fits a device of `given` bytes or, if that
    is None, the plan's GPU."""
    if inspected.summary.too_large:
        plan = replace(plan, remarks=(*plan.remarks, TOO_LARGE))
    trial = _try(plan)
    memory = _estimate(plan, trial)
    gpus = inspected.machine.gpus if plan.device == "cuda" else ()
    total = given or min((gpu.memory_bytes for gpu in gpus), default=None)
    needed = memory.peak
    if total is None or needed is None or isinstance(trial, str):
        return replace(plan, memory=memory)

    source = "requested" if given else "the GPU's memory"
    fit = Fit(total, source, needed, needed <= total)
    fit = _find_largest(fit, trial, plan.batch_size, lambda b: _at(request, inspected, b))
    return replace(plan, memory=replace(memory, fit=fit))


def estimate_all(
    plans: Sequence[Plan], trials: dict[Kind, MemoryTrial | str]
) -> list[MemoryEstimate]:
    """Estimate many plans in one child process. Plans of one kind share a trial of the smallest and
    the largest micro-batch; other sizes are interpolated. Add new trials to `trials`."""
    shared: dict[Kind, list[Plan]] = {}
    for plan in plans:
        if not find_unsupported(plan) and _kind(plan) not in trials:
            shared.setdefault(_kind(plan), []).append(plan)
    asked = []
    for alike in shared.values():
        sizes = {size for plan in alike for size in micro_batch_sizes(plan)}
        asked.append((alike[0], sorted({min(sizes), max(*sizes, 2 * min(sizes))})))
    if asked:
        trials |= zip(shared, try_memory(asked), strict=True)
    return [_estimate(plan, find_unsupported(plan) or trials[_kind(plan)]) for plan in plans]


def _kind(plan: Plan) -> Kind:
    """Return the key of plans that can share a trial, which counts what each stage saves."""
    return kind_of(plan), plan.stage_parts


def _try(plan: Plan) -> MemoryTrial | str:
    if reason := find_unsupported(plan):
        return reason
    sizes = micro_batch_sizes(plan)
    return try_memory([(plan, [*sizes, 2 * max(sizes)])])[0]


def _estimate(plan: Plan, trial: MemoryTrial | str) -> MemoryEstimate:
    if isinstance(trial, str):
        return MemoryEstimate(not_estimated=trial)
    notes = []
    if trial.built:
        notes.append(
            f"the model was built with real tensors, because fake tensors failed: {trial.built}"
        )
    if plan.device == "cuda":
        workspace = size(trial.workspace_bytes)
        notes.append(
            f"the peak includes the allocator's rounding to 512 bytes and {workspace} of measured "
            "workspaces for matrix products. It does not include cuDNN's workspaces, NCCL's "
            "buffers, blocks that the allocator does not split, fragmentation, or the CUDA context"
        )
    no_peak = NO_PEAK if plan.strategy == "dp" else None
    return MemoryEstimate(estimate(plan, trial), no_peak=no_peak, notes=tuple(notes))


def _at(request: Request, inspected: Inspected, batch_size: int) -> Plan | None:
    """Return the plan with a different batch size, assuming endless data. Return None if the batch
    is too small to be split."""
    try:
        plan = resolve_here(replace(request, batch_size=batch_size), inspected)
    except UsageError:
        return None
    return replace(plan, samples=None)


def _find_largest(
    fit: Fit, trial: MemoryTrial, batch_size: int, at: Callable[[int], Plan | None]
) -> Fit:
    """Search for the largest batch that fits. Run a trial with that batch and with the next larger
    one, and search again with the numbers, until trials show that the first fits and the second does
    not."""

    def needed(plan: Plan) -> int:
        return MemoryEstimate(estimate(plan, trial)).peak or 0

    def fits(size: int) -> bool:
        plan = at(size)
        return plan is None or needed(plan) <= fit.bytes

    for _ in range(MOST_TRIALS):
        largest = search(fits, batch_size, MOST_SAMPLES)
        if largest is None:
            return replace(fit, no_largest=f"more than {MOST_SAMPLES} samples fit")
        if (plan := at(largest) if largest else None) is None:
            return replace(fit, no_largest="no batch size fits")
        both = [plan, *filter(None, [at(largest + 1)])]
        sizes = {size for each in both for size in micro_batch_sizes(each)}
        sizes -= {each.samples for each in trial.passes}
        if not sizes:
            return replace(fit, largest_batch_size=largest, largest_batch_bytes=needed(plan))
        [more] = try_memory([(plan, sorted(sizes))])
        if isinstance(more, str):
            return replace(fit, no_largest=f"a trial with batch size {largest} failed: {more}")
        trial = replace(trial, passes=trial.passes + more.passes)
    return replace(fit, no_largest="the activations do not grow in proportion to the batch")


def search(fits: Callable[[int], bool], start: int, most: int) -> int | None:
    """Return the largest number that fits, 0 if none does, and None if it is larger than `most`.
    If a number fits, every smaller number must fit, too.

    start 16, 45 fits      16 ✓  32 ✓  64 ✗  48 ✗  40 ✓  44 ✓  46 ✗  45 ✓
    """
    low, high = (start, 2 * start) if fits(start) else (0, start)
    while low and fits(high):
        if high > most:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
