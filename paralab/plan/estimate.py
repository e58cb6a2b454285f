"""Divide the results of a memory trial among the devices of a plan. These are pure functions on
plain numbers.

The trial measures the whole model's parameters p, gradients g, and optimizer state o, and the
activations a(n) of n samples. The estimate for each device is

    single             p + g + o         + a(n)
    dp                 the same, n samples each; o only on the first device, which also has the
                       loss of all samples
    ddp, local-sgd     p + g + o         + a(n), and what a lossy algorithm keeps
    cp                 the same, but the trial has only the first part of each sequence
    fsdp               (p + g + o) / s   + a(n) + gathered parameters + unreduced gradients, where s
                       is the number of shards; with ZeRO-1, p + g + o of its own parameters
    mp, pipeline,      p + g + o of its stage's parameters, sharded as in fsdp with hybrid --zero,
    hybrid             + a of its stage, for each micro-batch between its forward and backward
    with shards        the same, but the model of the trial has only the first shard of each layer
                       that tp or hybrid splits

where n is the size of the largest micro-batch: 64 = 2 ranks × 4 accumulation steps × 8 samples has
a(8). The actual peak can be larger than such a sum because of temporary tensors. It can be smaller
because gradients grow while activations shrink in the first backward pass of a step. The trial also
recomputes blocks if the plan does, so a(n) contains one recomputed block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from paralab.plan.batches import chunk_sizes, pieces, replica_span, widest
from paralab.plan.grid import AXES, ranks_along
from paralab.plan.lossy import CASTS
from paralab.plan.memory_trial import DeviceEstimate, MemoryTrial, Pass, Weight
from paralab.plan.plan import Plan, RankPlan
from paralab.plan.schedules import order
from paralab.plan.sharding import owners
from paralab.plan.stages import most_kept

ESTIMATED = ("single", "dp", "ddp", "fsdp", "tp", "cp", "mp", "pipeline", "hybrid", "local-sgd")
COMPILED = (
    "torch.compile decides what a compiled block keeps for the backward pass, and fake tensors do not "
    "show that"
)
BUCKET_MB = 25.0  # the default size of a bucket
LOW = ("bf16", "fp16")
LOW_BYTES = 2  # bytes per element


def find_unsupported(plan: Plan) -> str | None:
    """Return why there is no estimate for this plan. A wrong estimate is worse than none."""
    if plan.strategy == "ep":
        return "with ep, the number of tokens per rank depends on the data"
    if plan.strategy not in ESTIMATED:
        return f"the effect of {plan.strategy} on memory is not estimated yet"
    if plan.tensor_plan and plan.shards_parameters and plan.precision in LOW:
        return f"the effect of {plan.precision} on split layers with --zero is not estimated yet"
    return COMPILED if plan.compile else None


def micro_batch_sizes(plan: Plan) -> list[int]:
    """Return the distinct sizes of the micro-batches in a full batch."""
    sizes: set[int] = set()
    for rank in plan.ranks:
        samples = rank_samples(plan, rank)
        if plan.schedule:
            sizes.add(widest(samples, plan.accumulate, plan.micro_batches))
            continue
        sizes.update(_sizes(plan, samples))
        if plan.strategy == "dp":
            sizes.update(chunk_sizes(max(sizes), plan.replicas))
    return sorted(sizes - {0})


def rank_samples(plan: Plan, rank: RankPlan) -> int:
    """Return the rank's samples in the first batch, which may be smaller than the batch size. A
    schedule pads all micro-batches to the size of a full batch's."""
    if plan.schedule:
        return rank.samples_per_step
    size = min(plan.batch_size, plan.samples or plan.batch_size)
    start, stop = replica_span(size, plan.rank_replicas, rank.replica)
    return stop - start


def _sizes(plan: Plan, samples: int) -> list[int]:
    """Return the micro-batch sizes in the largest accumulation step."""
    return [stop - start for start, stop in pieces(samples, plan.accumulate, plan.micro_batches)[0]]


def estimate(plan: Plan, trial: MemoryTrial) -> tuple[DeviceEstimate, ...]:
    """Return the estimate for each device of each rank."""
    estimates: list[DeviceEstimate] = []
    for rank in plan.ranks:
        groups = count_groups(plan, rank)
        names = list(dict.fromkeys(device.name for device in rank.devices))
        for name in names:
            if plan.shards_parameters and not plan.schedule:
                each = _estimate_shard(plan, trial, rank, name)
            elif plan.stage_parts and (plan.schedule or not plan.tensor_plan):
                each = _estimate_stages(plan, trial, rank, name)
            elif plan.strategy == "dp":
                each = _estimate_replica(plan, trial, rank, names.index(name))
            else:
                each = _estimate_whole(plan, trial, rank, name)
            estimates.append(replace(each, staging=groups * plan.staging_bytes))
    return tuple(estimates)


def count_groups(plan: Plan, rank: RankPlan) -> int:
    """Return the number of a rank's process groups that may move tensors, as in
    worker/groups.py."""
    groups = 1 if plan.schedule else plan.stages
    groups += 2 * (plan.shard_groups > 1)
    if plan.schedule or plan.tensor_plan or plan.sequence_plan:
        cells = [each.cell for each in plan.ranks]
        along = (ranks for axis in AXES for ranks in ranks_along(axis, cells))
        groups += sum(rank.rank in ranks and len(ranks) > 1 for ranks in along)
    return groups


@dataclass(frozen=True)
class _State:
    """Bytes of some parameters, their gradients, and their optimizer state."""

    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, weights: Iterable[Weight]) -> _State:
        weights = list(weights)
        return cls(
            sum(each.bytes for each in weights),
            sum(each.gradient_bytes for each in weights),
            sum(each.state_bytes + each.other_state_bytes for each in weights),
        )

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def _device(
    rank: RankPlan,
    device: str,
    state: _State,
    activations: int,
    peak: int | None,
    gathered: int | None = None,
    unreduced: int | None = None,
    buckets: int | None = None,
) -> DeviceEstimate:
    counted = state.total + activations + (gathered or 0) + (unreduced or 0)
    parts = state.parameters, state.gradients, state.optimizer, activations
    more = gathered, unreduced, buckets
    return DeviceEstimate(rank.rank, device, *parts, *more, counted, peak)


def _saved_bytes(each: Pass) -> int:
    """Return the bytes saved for backward, including the most that recomputation adds."""
    return sum(each.saved) + each.loss + max(map(each.added_in, range(len(each.saved))))


def _constant_bytes(trial: MemoryTrial, samples: int) -> int:
    """Return the bytes allocated during the entire step on a device with the whole model: buffers,
    samples, and CUDA's workspaces."""
    batch = trial.at(samples, lambda each: each.batch_bytes)
    return sum(trial.buffers.values()) + batch + trial.workspace_bytes


def _estimate_whole(plan: Plan, trial: MemoryTrial, rank: RankPlan, name: str) -> DeviceEstimate:
    """Estimate a device's memory for the whole model: single, tp, cp, local-sgd, ddp, and ddp with
    ZeRO-1. ddp's buckets are as large as the gradients. With `gradient_as_bucket_view`, gradients
    are views of buckets, so they exist from the start of each step."""
    samples = rank_samples(plan, rank)
    size, state = widest(samples, plan.accumulate, 1), _State.of(trial.weights)
    buckets, step_bytes = None, trial.step_bytes
    if plan.zero == 1:
        owned = _own_weights(plan, trial.weights, rank)
        state = replace(state, optimizer=_State.of(owned).optimizer)
        step_bytes //= plan.replicas
    if plan.strategy in ("ddp", "fsdp"):
        buckets = 0 if plan.bucket_view else state.gradients
        if plan.compress in CASTS:  # in the worst case, all buckets are rounded at the same time
            buckets += state.gradients * LOW_BYTES // 4
    elif (
        plan.sequence_plan
        or plan.sequence_parallel
        or (plan.rank_replicas > 1 and not plan.sync_every)
    ):
        buckets = min(state.gradients, _bucket_bytes(plan))

    kept, average = _kept_by_lossy(plan, trial)
    state = replace(state, optimizer=state.optimizer + kept)
    again = state.gradients + trial.at(size, lambda each: each.again)
    accumulates = plan.accumulate > 1 or plan.bucket_view
    moving = again if accumulates else trial.at(size, lambda each: each.first)
    moving = max(moving, state.gradients + max(step_bytes, average))
    constant = _constant_bytes(trial, samples)
    peak = state.parameters + state.optimizer + moving + (buckets or 0) + constant
    return _device(rank, name, state, trial.at(size, _saved_bytes), peak, buckets=buckets)


def _own_weights(plan: Plan, weights: Sequence[Weight], rank: RankPlan) -> list[Weight]:
    """Return the parameters that this rank updates with ZeRO-1."""
    own = owners([(each.group, each.whole or each.elements) for each in weights], plan.replicas)
    return [each for each, owner in zip(weights, own, strict=True) if owner == rank.replica]


def _kept_by_lossy(plan: Plan, trial: MemoryTrial) -> tuple[int, int]:
    """Return the bytes that a lossy algorithm keeps between steps, and those that it needs briefly
    after the optimizer's step.

    local-sgd   to average: weighted copies of the parameters, and their sum. An outer optimizer
                keeps the last common parameters and, with momentum, one more copy. In its step, the
                averages, their differences, and Nesterov's sum exist too
    powersgd    the error of each gradient, and two thin matrices. To compress: copies of the
                gradient and of its error
    """
    trained = [each for each in trial.weights if each.trained]
    whole = sum(each.bytes for each in trained)
    if plan.sync_every:
        if not plan.lossy.has_outer_optimizer:
            return 0, 2 * whole
        return (1 + (plan.outer_momentum > 0)) * whole, (3 + (plan.outer_momentum > 0)) * whole
    if plan.compress == "powersgd":
        return whole + sum(_thin_bytes(each, plan.powersgd_rank) for each in trained), 2 * whole
    return 0, 0


def _thin_bytes(each: Weight, rank: int) -> int:
    """Return the bytes of PowerSGD's two matrices, as in worker/power_sgd.py."""
    n, m = each.rows, each.elements // each.rows
    rank = min(n, m, rank)
    worth = (n + m) * rank * 2 < n * m
    return (n + m) * rank * each.bytes // each.elements if worth else 0


def _bucket_bytes(plan: Plan) -> int:
    """Return the size of the buckets that sum gradients without DDP."""
    return int((plan.bucket_mb or BUCKET_MB) * 2**20)


def _estimate_replica(
    plan: Plan, trial: MemoryTrial, rank: RankPlan, number: int
) -> DeviceEstimate:
    """Estimate a device's memory under dp. The first device computes the loss for all replicas'
    outputs."""
    size = widest(rank_samples(plan, rank), plan.accumulate, 1)
    own = chunk_sizes(size, plan.replicas)[number]
    activations = trial.at(own, lambda each: each.saved[0]) if own else 0
    state = _State.of(trial.weights)
    if number:
        state = _State(state.parameters, state.gradients, 0)
    else:
        activations += trial.at(size, lambda each: each.loss_alone)
    if own:
        activations = max(activations, trial.at(own, lambda each: each.recomputed_in(0)))
    return _device(rank, rank.devices[number].name, state, activations, None)


def _estimate_shard(plan: Plan, trial: MemoryTrial, rank: RankPlan, name: str) -> DeviceEstimate:
    """Estimate a device's memory under fsdp."""
    ranks, samples = plan.shards_per_parameter, rank_samples(plan, rank)
    state = _state_of_shards(plan, trial.weights, rank)
    size = widest(samples, plan.accumulate, 1)
    gathered, unreduced = _gathered_bytes(plan, trial, trial.weights) if ranks > 1 else (None, None)
    # At the start of the first backward pass, no gradients are sharded. At the end, all are.
    before = state.gradients if plan.accumulate > 1 and plan.sync_every_pass else 0
    start = before + trial.at(size, lambda each: each.again)
    moving = max(start, state.gradients + trial.step_bytes // ranks)
    always = (gathered or 0) + (unreduced or 0) + _constant_bytes(trial, samples)
    peak = state.parameters + state.optimizer + moving + always
    return _device(rank, name, state, trial.at(size, _saved_bytes), peak, gathered, unreduced)


def _state_of_shards(plan: Plan, weights: Iterable[Weight], rank: RankPlan) -> _State:
    """Return this rank's shards. Each parameter is split like torch.chunk: 5 rows -> 3 2."""
    ranks = plan.shards_per_parameter

    def shard(each: Weight) -> Weight:
        rows = chunk_sizes(each.rows, ranks)[rank.replica % ranks]
        sizes = (each.bytes, each.gradient_bytes, each.state_bytes)
        parameter, gradient, state = (size * rows // each.rows for size in sizes)
        return replace(each, bytes=parameter, gradient_bytes=gradient, state_bytes=state)

    return _State.of(map(shard, weights))


def _gathered_bytes(plan: Plan, trial: MemoryTrial, weights: Sequence[Weight]) -> tuple[int, int]:
    """Return the bytes of fsdp's full parameters and full gradients that exist at the same time.

    The parameters are those outside all units and those of two neighboring units, because fsdp
    prefetches one. With ZeRO-2, all units count. The gradients are those of one unit, or of all
    units if fsdp reduces them only after the last micro-batch.
    """
    low = plan.precision in LOW
    names = [*(trial.norms if low else ()), *plan.shard_units]
    units: dict[str, list[Weight]] = {name: [] for name in [*dict.fromkeys(names), ""]}
    for each in weights:
        inside = [name for name in units if not name or each.name.startswith(f"{name}.")]
        units[max(inside, key=len)].append(each)

    full = [
        sum(each.elements * LOW_BYTES if low else each.bytes for each in unit)
        for unit in units.values()
    ]
    gradients = [sum(each.bytes for each in unit if each.trained) for unit in units.values()]
    *own, rest = full
    pairs = [one + other for one, other in pairwise(own)] or own
    together = bool(plan.schedule) or (plan.accumulate > 1 and not plan.sync_every_pass)
    together_gathered = sum(own) if plan.zero == 2 else max(pairs, default=0)
    return rest + together_gathered, (sum if together else max)(gradients)


def _estimate_stages(plan: Plan, trial: MemoryTrial, rank: RankPlan, name: str) -> DeviceEstimate:
    """Estimate a device's memory with stages. Temporary tensors are at most as large as the whole
    model's."""
    samples = rank_samples(plan, rank)
    own = list(_stages_on(rank, name))
    parts = [part for stage in own for part in range(stage, len(plan.stage_parts), plan.stages)]
    modules = {module for part in parts for module in plan.stage_parts[part].modules}
    weights = [w for w in trial.weights if w.name.rpartition(".")[0] in modules]
    state = _state_of_shards(plan, weights, rank)
    gathered, unreduced = None, None
    if plan.shards_per_parameter > 1:
        gathered, unreduced = _gathered_bytes(plan, trial, weights)
    elif plan.zero == 1:
        # Each process has an optimizer for its own stages.
        owned = _own_weights(plan, weights if plan.schedule else trial.weights, rank)
        state = replace(state, optimizer=_State.of(w for w in weights if w in owned).optimizer)

    activations = sum(_kept_by_stage(plan, trial, samples, stage) for stage in own)
    size = widest(samples, plan.accumulate, plan.micro_batches)
    temporary = trial.at(size, lambda each: max(0, each.again - _saved_bytes(each)))
    buckets = None
    if plan.rank_replicas > 1 and not plan.shards_parameters:
        largest = _bucket_bytes(plan) if plan.schedule else state.gradients
        buckets = min(state.gradients, largest)
    more = sum(each or 0 for each in (buckets, gathered, unreduced))
    peak = state.total + activations + max(temporary, trial.step_bytes) + more
    peak += _constant_bytes(trial, samples)
    return _device(rank, name, state, activations, peak, gathered, unreduced, buckets)


def _stages_on(rank: RankPlan, name: str) -> Iterator[int]:
    if rank.stage is not None:
        yield rank.stage
        return
    for stage, device in enumerate(rank.devices):
        if device.name == name:
            yield stage


def _kept_by_stage(plan: Plan, trial: MemoryTrial, samples: int, stage: int) -> int:
    """Return the peak of the bytes that autograd saves for a stage's micro-batches. If the
    plan recomputes blocks, this includes the memory to recompute one block."""

    def of_part(part: int, size: int) -> int:
        return trial.at(size, lambda each: each.saved_in(part))

    def again(size: int) -> int:
        parts = range(stage, len(plan.stage_parts), plan.stages)
        return trial.at(size, lambda each: max(map(each.added_in, parts)))

    if plan.schedule is None:  # gpipe's order: all forward passes, then all backward passes
        sizes = _sizes(plan, samples)
        return sum(of_part(stage, size) for size in sizes) + again(max(sizes))
    size = widest(samples, plan.accumulate, plan.micro_batches)  # smaller micro-batches are padded
    actions = order(plan.schedule, plan.stages, plan.micro_batches)[stage]
    return round(most_kept(actions, lambda part: of_part(part, size))[1]) + again(size)
