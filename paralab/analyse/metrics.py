"""Compute how a run spends its step time, using only the run folder. docs/metrics.md defines each
number.

The diagram shows one step on one DDP rank with two buckets. The other rank is slower: its bucket 1
becomes ready at `w`.

    device     [ forward ][      backward      ]                       [optimizer]
    bucket 0                  [ready ··· done]
    bucket 1                               [ready ····· w ······ done]
                                           |waiting    |transferring |
                                                ^ exposed: the device is idle

A bucket's *transfer* starts when its last rank is ready. Before that, a rank *waits* for a slower
one. Communication is free while the device computes; the rest is exposed.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from msgspec.structs import replace

from paralab.analyse.metric_types import (
    Bubble,
    Bucket,
    Busy,
    Metrics,
    Parts,
    RankParts,
    StepShares,
    Straggler,
)
from paralab.analyse.recording import Recording, bounds, mean, median, seconds_between
from paralab.analyse.time_intervals import Interval, length, union, without
from paralab.analyse.utilization import count_gradients, mean_load, model_flops
from paralab.plan.schedules import ideal_bubble
from paralab.record.events import COLLECTIVES, REDUCES, Collective, Span, Step

IN_PROCESS = ("scatter", "replicate", "gather", "reduce")  # DataParallel copies
RULE = 0.10  # the handbook's rule of thumb: communication below a tenth of the step
LATE_SHARE = 0.10  # a rank is late if the other ranks wait for it for this share of a step
LATE_STEPS = 0.70  # a rank is a straggler if it is late in this share of the steps

# The collective, its ranks, stage, bucket (or FSDP unit), and how many times it has already
# occurred in the step.
BucketKey = tuple[str, tuple[int, ...], int, int, int]
PARTS = tuple(Parts.__struct_fields__)


def metrics_of(recording: Recording) -> Metrics:
    ranks = range(recording.world_size)
    measured = recording.detailed
    per_step = [
        [_lengths(step_intervals(recording, rank, step)) for rank in ranks] for step in measured
    ]
    # With local-sgd, most steps do not communicate, so the median step would have no communication.
    typical = mean if recording.plan.sync_every else median
    step_seconds = typical([seconds_between([recording.step(step)]) for step in measured])
    means = [
        {name: statistics.mean(rank[name] for rank in step) for name in PARTS} for step in per_step
    ]
    parts = _typical(means, typical)
    communication, exposed = parts["communication_seconds"], parts["exposed_communication_seconds"]
    share, busy = _ratio(communication, step_seconds), _busy(recording, measured)
    # Events do not include nn.DataParallel's replicas on other GPUs, but NVML's load does.
    hidden = recording.plan.strategy == "dp" and recording.plan.device == "cuda"
    why = "nn.DataParallel adds up the gradients inside the backward pass"
    return Metrics(
        **parts,
        steps_measured=len(measured),
        overlap=1 - (exposed or 0.0) / communication if communication else None,
        communication_share=share,
        exposed_share=_ratio(exposed, step_seconds),
        shares=mean_shares([_shares(rank) for step in per_step for rank in step]),
        keeps_rule=share < RULE if share else None,
        data_seconds=median(_loading(recording)),
        data_wait_seconds=median(_gaps(recording)),
        per_rank=[
            RankParts(rank=rank, **_typical([step[rank] for step in per_step], typical))
            for rank in ranks
        ],
        buckets=_buckets(recording, measured),
        straggler=_straggler(recording, measured, per_step, step_seconds or 0.0),
        bubble=_bubble(recording, measured),
        busy=busy,
        balance=None if hidden else _balance(busy),
        load=mean_load(recording),
        flops=model_flops(recording, step_seconds),
        gradients=count_gradients(recording),
        not_measured={"reduce": why} if hidden else {},
    )


def step_intervals(recording: Recording, rank: int, step: int) -> dict[str, list[Interval]]:
    """Return each part's intervals in a rank's step: `forward`, `exposed_communication`, …"""
    spans = clip_backward(recording.spans(rank, step))
    waits: list[Interval] = []
    if recording.plan.strategy == "dp":
        halted = transfers = union(_intervals(spans, *IN_PROCESS))
    else:
        transfers, waits = transfers_and_waits(recording.spans_of_ranks(step), rank)
        halted = _find_blocked(spans)
    forward = without(_intervals(spans, "forward"), halted)
    backward = without(_intervals(spans, "backward"), halted)
    optimizer = without(_intervals(spans, "optimizer"), halted)
    busy = [*forward, *backward, *optimizer]
    exposed, exposed_waits = without(transfers, busy), without(waits, busy)
    steps = recording.step(step)
    total = [steps[rank].interval]
    return {
        "forward": forward,
        "backward": backward,
        "compute": [*forward, *backward],
        "optimizer": optimizer,
        "communication": transfers,
        "exposed_communication": exposed,
        "waiting": waits,
        "exposed_waiting": exposed_waits,
        "other": without(total, [*busy, *exposed, *exposed_waits]),
        "skew": without([bounds([steps])], total),
    }


def _lengths(intervals: dict[str, list[Interval]]) -> dict[str, float]:
    return {f"{part}_seconds": length(own) for part, own in intervals.items()}


def _shares(parts: dict[str, float]) -> StepShares:
    """Divide a step's parts by its length. Overlapping parts count once: a stage's backward pass
    during another stage's forward pass counts as forward."""
    names = ("forward", "optimizer", "exposed_communication", "other", "skew")
    seconds = {name: parts[f"{name}_seconds"] for name in names}
    seconds["backward"] = parts["compute_seconds"] - parts["forward_seconds"]
    seconds["waiting"] = parts["exposed_waiting_seconds"]
    return StepShares(**{name: each / sum(seconds.values()) for name, each in seconds.items()})


def mean_shares(steps: Sequence[StepShares]) -> StepShares | None:
    """Average the shares over the steps. Unlike medians, means add up to 1."""
    if not steps:
        return None
    names = StepShares.__struct_fields__
    return StepShares(**{name: statistics.mean(each[name] for each in steps) for name in names})


def _typical(
    steps: list[dict[str, float]], typical: Callable[[list[float]], float | None]
) -> dict[str, float | None]:
    return {name: typical([step[name] for step in steps]) for name in PARTS}


def _intervals(spans: Sequence[Span], *names: str) -> list[Interval]:
    return [span.interval for span in spans if span.event in names]


def _find_blocked(spans: Sequence[Span]) -> list[Interval]:
    """Return when a collective (ZeRO-1's, or FSDP's over gloo) blocked the compute thread."""
    return union([span.interval for span in collectives(spans) if span.blocking])


def collectives(spans: Sequence[Span]) -> list[Collective]:
    return [span for span in spans if isinstance(span, Collective)]


def clip_backward(spans: Sequence[Span]) -> list[Span]:
    """Return the spans without the wait at the end of each backward pass. DDP waits there for its
    buckets, but the computation ends when the last bucket is ready."""
    passes = sorted((s for s in spans if s.event == "backward"), key=lambda span: span.end)
    last = {span.accumulation or 0: span for span in passes}  # last pass per accumulation step
    ready = [span.start for span in spans if span.event in REDUCES]

    def clip(span: Span) -> Span:
        if span.event != "backward" or span is not last[span.accumulation or 0]:
            return span
        inside = (time for time in ready if span.start <= time <= span.end)
        return replace(span, end=max(inside, default=span.end))

    return [clip(span) for span in spans]


def transfers_and_waits(
    ranks: Sequence[Sequence[Span]], rank: int
) -> tuple[list[Interval], list[Interval]]:
    """Return when this rank's buckets were transferred, and when it waited for a slower rank."""
    ready = last_ready(ranks)
    transfers, waits = [], []
    for key, span in _index_collectives(ranks[rank]).items():
        begun = min(ready[key], span.end)
        transfers.append((begun, span.end))
        waits.append((span.start, begun))
    return union(transfers), without(waits, transfers)


def last_ready(ranks: Sequence[Sequence[Span]]) -> dict[BucketKey, float]:
    """Return the time when the last rank was ready to reduce each bucket."""
    ready: dict[BucketKey, float] = {}
    for spans in ranks:
        for key, span in _index_collectives(spans).items():
            ready[key] = max(ready.get(key, span.start), span.start)
    return ready


def _index_collectives(spans: Sequence[Span]) -> dict[BucketKey, Collective]:
    """Index collectives, in order of their start, by a key that is the same on all ranks."""
    times: Counter[tuple[str, tuple[int, ...], int, int]] = Counter()
    keyed = {}
    for span in sorted(collectives(spans), key=lambda span: span.start):
        which = (span.event, span.ranks or (), span.stage or 0, span.bucket)
        keyed[(*which, times[which])] = span
        times[which] += 1
    return keyed


def _loading(recording: Recording) -> list[float]:
    """Return the seconds spent loading data on the CPU, for each timed step on each rank."""
    first = recording.timed[0][0].step if recording.timed else 0
    spans = [span for rank in range(recording.world_size) for span in recording.named("data", rank)]
    return [span.seconds for span in spans if span.step >= first]


def _gaps(recording: Recording) -> list[float]:
    """Return the idle seconds between consecutive steps on each rank."""
    ranks = [recording.of(Step, rank)[recording.warm_up :] for rank in range(recording.world_size)]
    pairs = [pair for steps in ranks for pair in pairwise(steps)]
    return [max(0.0, after.start - before.end) for before, after in pairs]


def _buckets(recording: Recording, measured: list[int]) -> list[Bucket]:
    """Return all collectives in the last measured step, on rank 0's clock."""
    buckets = []
    for step in measured[-1:]:
        begin, length_seconds = recording.step(step)[0].start, recording.step(step)[0].seconds
        ready = last_ready(recording.spans_of_ranks(step))
        for key, span in _index_collectives(recording.spans(0, step)).items():
            seconds = max(0.0, span.end - ready[key])  # clocks differ by microseconds
            bucket = Bucket(
                kind=span.event,
                stage=span.stage or 0,
                bucket=span.bucket,
                unit=span.unit,
                bytes=span.bytes,
                ready_seconds=span.start - begin,
                ready_share=(span.start - begin) / length_seconds,
                transfer_seconds=seconds,
                bytes_per_second=span.bytes / seconds if seconds > 0 else None,
            )
            buckets.append(bucket)
    return buckets


def _straggler(
    recording: Recording,
    measured: list[int],
    parts: list[list[dict[str, float]]],
    step_seconds: float,
) -> Straggler | None:
    """Find the rank that others wait for. `parts` has an entry for each rank in each step."""
    if recording.world_size < 2 or not measured:
        return None
    # A rank is late only relative to the ranks it reduces with. If each stage is a process, those
    # are the ranks with the same stage in other replicas.
    stages = {rank.rank: rank.stage for rank in recording.plan.ranks}
    last: Counter[int] = Counter()
    for step in measured:
        ready = {
            rank: max((s.start for s in collectives(recording.spans(rank, step))), default=0.0)
            for rank in range(recording.world_size)
        }
        late = {
            rank: at - min(ready[other] for other in ready if stages[other] == stages[rank])
            for rank, at in ready.items()
        }
        last[max(late, key=late.__getitem__)] += 1

    (rank, times), of = last.most_common(1)[0], len(measured)
    waiting = [[each["exposed_waiting_seconds"] for each in ranks] for ranks in parts]
    waited = statistics.median(max(ranks[:rank] + ranks[rank + 1 :]) for ranks in waiting)
    if waited < LATE_SHARE * step_seconds or times < LATE_STEPS * of:
        return None
    share = waited / step_seconds
    return Straggler(rank=rank, waited_seconds=waited, share_of_step=share, last_in=times, of=of)


def _bubble(recording: Recording, measured: list[int]) -> Bubble | None:
    plan = recording.plan
    if plan.stages < 2:
        return None
    pipelines = [spans for step in measured for spans in pipelines_of(recording, step)]
    shares = [share for spans in pipelines for share in pass_bubbles(spans, plan.stages)]
    ideal = ideal_bubble(plan.stages, plan.micro_batches, plan.schedule or "gpipe")
    return Bubble(measured=statistics.median(shares), ideal=ideal) if shares else None


def pipelines_of(recording: Recording, step: int) -> list[list[Span]]:
    """Return the spans of each replica's stages in a step. With a schedule, each stage has its own
    rank; otherwise, one rank runs all stages.

    Each rank in a pipeline starts to synchronize when its own passes are done. Work on other ranks
    during that time is not clipped."""
    if not recording.plan.schedule:
        return [recording.spans(rank, step) for rank in range(recording.world_size)]
    replicas: dict[int, list[Span]] = {}
    for rank in recording.plan.ranks:
        # The shards of a stage work at the same time, so the first one represents all.
        spans = recording.spans(rank.rank, step) if not rank.shard else []
        passes = [span for span in spans if span.event in ("forward", "backward")]
        replicas.setdefault(rank.replica, []).extend(passes)
    return list(replicas.values())


def pass_bubbles(spans: Sequence[Span], stages: int) -> list[float]:
    """Return the bubble in each accumulation step."""
    shares = []
    for number in sorted({span.accumulation or 0 for span in spans if span.micro is not None}):
        mine = [s for s in spans if (s.accumulation or 0) == number or s.event in COLLECTIVES]
        work = _intervals(clip_backward(mine), "forward", "backward")
        window = max(end for _, end in work) - min(start for start, _ in work)
        busy = sum(end - start for start, end in work)
        shares.append(1 - busy / (stages * window) if window else 0.0)
    return shares


def _busy(recording: Recording, measured: list[int]) -> list[Busy]:
    lengths = [seconds_between([recording.step(step)]) for step in measured]
    devices = []
    for rank in recording.plan.ranks:
        for number, device in enumerate(dict.fromkeys(d.name for d in rank.devices)):
            all_spans = [recording.spans(rank.rank, step) for step in measured]
            times = [_device_seconds(recording, spans, device, not number) for spans in all_spans]
            share = median([time / length for time, length in zip(times, lengths, strict=True)])
            devices.append(Busy(rank=rank.rank, device=device, seconds=median(times), share=share))
    return devices


def _device_seconds(recording: Recording, spans: list[Span], device: str, first: bool) -> float:
    """Return how long a device computed, copied, and updated in one step. Spans without a device
    (copies, the optimizer) are attributed to the first device."""
    if recording.plan.strategy == "dp" and recording.plan.device == "cpu":
        mine = [span for span in spans if span.device == device]
        work = _intervals(mine, "replica_forward", "replica_backward")
    else:
        mine = clip_backward([span for span in spans if span.device in (device, None)])
        work = without(_intervals(mine, "forward", "backward"), _find_blocked(spans))
    updates = without(_intervals(spans, "optimizer"), _find_blocked(spans))
    return length([*work, *updates, *_intervals(spans, *IN_PROCESS)] if first else work)


def _balance(busy: list[Busy]) -> float | None:
    seconds = [device.seconds for device in busy if device.seconds is not None]
    return _ratio(seconds[0], statistics.mean(seconds[1:])) if len(seconds) > 1 else None


def _ratio(value: float | None, total: float | None) -> float | None:
    return None if value is None or not total else value / total
