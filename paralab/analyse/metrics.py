"""Where the time of a step went, from the run folder alone. Every number is defined in
docs/metrics.md.

One step of one rank of DDP, two buckets; the other rank is slower, and its bucket 1 is ready only
at `w`:

    device     [ forward ][      backward      ]                       [optimizer]
    bucket 0                     [ready ··· done]
    bucket 1                               [ready ····· w ······ done]
                                               |waiting |transferring|            exposed: the device has nothing to do

A bucket is *transferred* from the moment its last rank is ready. Before that a rank *waits* for a
slower one. What of both happens while the device computes costs nothing; the rest is exposed.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from paralab.analyse.recording import Recording
from paralab.analyse.time_intervals import Interval, length, union, without
from paralab.machine.peaks import PEAKS
from paralab.plan.schedules import ideal_bubble
from paralab.record.reader import Event

REDUCES = ("all_reduce", "reduce_scatter")  # what ends a backward pass: gradients on their way
COLLECTIVES = (*REDUCES, "all_gather")
IN_PROCESS = (
    "scatter",
    "replicate",
    "gather",
    "reduce",
)  # DataParallel's copying between its replicas
RULE = 0.10  # the handbook's bar: communication below a tenth of the step
LATE_SHARE = 0.10  # a rank is a straggler if the others wait for it a tenth of a step …
LATE_STEPS = 0.70  # … and in most of the steps

BucketKey = tuple[
    str, int, int, int
]  # kind of collective, stage, bucket (or unit of shards), which time in the step


def metrics_of(recording: Recording) -> dict[str, Any]:
    """The metrics of docs/metrics.md; None where a number cannot be known, with the reason in
    `not_measured`."""
    ranks = range(recording.world_size)
    measured = [step[0]["step"] for step in recording.timed if recording.spans(0, step[0]["step"])]
    per_step = [[_rank_step(recording, rank, step) for rank in ranks] for step in measured]
    lengths = [recording.seconds_of(recording.step(step)) for step in measured]
    step_seconds = _median(lengths)
    parts: dict[str, Any] = {
        name: _median([statistics.mean(rank[name] for rank in step) for step in per_step])
        for name in _PARTS
    }
    communication = parts["communication_seconds"]
    not_measured: dict[str, str] = {}
    if recording.plan["strategy"] == "dp" and recording.plan["device"] == "cuda":
        not_measured["reduce"] = (
            "nn.DataParallel adds the gradients up inside the backward pass, where it cannot be told apart"
        )
    data = [_per_rank_data(recording, rank) for rank in ranks]
    return {
        "steps_measured": len(measured),
        **parts,
        "overlap": 1 - parts["exposed_communication_seconds"] / communication
        if communication
        else None,
        "communication_share": _ratio(communication, step_seconds),
        "exposed_share": _ratio(parts["exposed_communication_seconds"], step_seconds),
        "keeps_rule": None
        if not communication or not step_seconds
        else communication / step_seconds < RULE,
        "data_seconds": _median([seconds for rank in data for seconds in rank["loading"]]),
        "data_wait_seconds": _median([seconds for rank in data for seconds in rank["waiting"]]),
        "per_rank": [
            {
                "rank": rank,
                **{name: _median([step[rank][name] for step in per_step]) for name in _PARTS},
            }
            for rank in ranks
        ],
        "buckets": _buckets(recording, measured),
        "straggler": straggler(
            recording,
            measured,
            [[rank["exposed_waiting_seconds"] for rank in step] for step in per_step],
            step_seconds or 0.0,
        ),
        "bubble": _bubble(recording, measured),
        "busy": _busy(recording, measured),
        "balance": _balance(recording, measured),
        "load": _load(recording),
        "flops": _flops(recording, step_seconds),
        "gradients": _gradients(recording),
        "not_measured": not_measured,
    }


_PARTS = (
    "forward_seconds",
    "backward_seconds",
    "compute_seconds",
    "optimizer_seconds",
    "communication_seconds",
    "exposed_communication_seconds",
    "waiting_seconds",
    "exposed_waiting_seconds",
    "other_seconds",
)


def _rank_step(recording: Recording, rank: int, step: int) -> dict[str, float]:
    """Where one rank's time of one step went, in seconds."""
    spans = recording.spans(rank, step)
    waits: list[Interval] = []
    forward, backward, optimizer = (
        _intervals(spans, name) for name in ("forward", "backward", "optimizer")
    )
    if recording.plan["strategy"] == "dp":
        transfers = union(_intervals(spans, *IN_PROCESS))
        forward, backward = without(forward, transfers), without(backward, transfers)
    else:
        transfers, waits = transfers_and_waits(recording, rank, step)
        halted = blocked(spans)
        forward, backward = without(forward, halted), without(computing(spans), halted)
    compute = union([*forward, *backward])
    busy = union([*compute, *optimizer])
    exposed, exposed_waits = without(transfers, busy), without(waits, busy)
    whole = [(recording.step(step)[rank]["start"], recording.step(step)[rank]["end"])]
    known = [*busy, *exposed, *exposed_waits]
    return {
        "forward_seconds": length(forward),
        "backward_seconds": length(backward),
        "compute_seconds": length(compute),
        "optimizer_seconds": length(optimizer),
        "communication_seconds": length(transfers),
        "exposed_communication_seconds": length(exposed),
        "waiting_seconds": length(waits),
        "exposed_waiting_seconds": length(exposed_waits),
        "other_seconds": length(without(whole, known)),
    }


def _intervals(spans: Sequence[Event], *names: str) -> list[Interval]:
    return [(span["start"], span["end"]) for span in spans if span["event"] in names]


def blocked(spans: Sequence[Event]) -> list[Interval]:
    """When the rank could not compute, though inside a pass: FSDP's collectives over gloo hold the
    thread that runs the model."""
    return union(
        [
            (span["start"], span["end"])
            for span in spans
            if span["event"] in COLLECTIVES and span.get("blocking")
        ]
    )


def computing(spans: Sequence[Event]) -> list[Interval]:
    """The backward passes, without the wait at their end.

    DDP ends a synchronized backward pass by waiting for its buckets. Its computation has ended when
    its last bucket was ready: nothing but gradients is computed there.
    """
    passes = [span for span in spans if span["event"] == "backward"]
    last: dict[int, Event] = {}
    for span in passes:
        number = span.get("accumulation", 0)
        if number not in last or span["end"] > last[number]["end"]:
            last[number] = span
    found = []
    for span in passes:
        end = span["end"]
        if span is last[span.get("accumulation", 0)]:
            ready = [
                s["start"]
                for s in spans
                if s["event"] in REDUCES and span["start"] <= s["start"] <= span["end"]
            ]
            end = max(ready, default=end)
        found.append((span["start"], end))
    return found


def transfers_and_waits(
    recording: Recording, rank: int, step: int
) -> tuple[list[Interval], list[Interval]]:
    """(when this rank's buckets were transferred, when it only waited for a slower rank to be
    ready)."""
    ready = last_ready(recording, step)
    transfers, waits = [], []
    for key, span in _keyed(recording.spans(rank, step)).items():
        begun = min(max(ready[key], span["start"]), span["end"])
        transfers.append((begun, span["end"]))
        waits.append((span["start"], begun))
    return union(transfers), without(waits, transfers)


def last_ready(recording: Recording, step: int) -> dict[BucketKey, float]:
    """When the last rank was ready to reduce each bucket."""
    ready: dict[BucketKey, float] = {}
    for rank in range(recording.world_size):
        for key, span in _keyed(recording.spans(rank, step)).items():
            ready[key] = max(ready.get(key, span["start"]), span["start"])
    return ready


def _keyed(spans: Sequence[Event]) -> dict[BucketKey, Event]:
    """Collectives by what tells them apart on every rank alike. The order in which they were *done*
    may differ."""
    times: Counter[tuple[str, int, int]] = Counter()
    found = {}
    for span in sorted(
        (s for s in spans if s["event"] in COLLECTIVES), key=lambda s: float(s["start"])
    ):
        which = (str(span["event"]), span.get("stage", 0), span["bucket"])
        found[(*which, times[which])] = span
        times[which] += 1
    return found


def _per_rank_data(recording: Recording, rank: int) -> dict[str, list[float]]:
    """Loading on the host, and the gap between two steps in which the device had nothing to do."""
    steps = recording.named("step", rank)[recording.warm_up :]
    first = steps[0]["step"] if steps else 0
    loading = [e["end"] - e["start"] for e in recording.named("data", rank) if e["step"] >= first]
    waiting = [max(0.0, after["start"] - before["end"]) for before, after in pairwise(steps)]
    return {"loading": loading, "waiting": waiting}


def _buckets(recording: Recording, measured: list[int]) -> list[dict[str, Any]]:
    """Every collective of the last measured step, on rank 0's clock: when in the step, how large,
    how fast."""
    if not measured:
        return []
    step = measured[-1]
    begin = recording.step(step)[0]["start"]
    ready = last_ready(recording, step)
    found = []
    for key, span in sorted(
        _keyed(recording.spans(0, step)).items(), key=lambda item: float(item[1]["start"])
    ):
        seconds = span["end"] - ready[key]
        found.append(
            {
                "kind": key[0],
                "stage": key[1],
                "bucket": key[2],
                "bytes": span["bytes"],
                "ready_seconds": span["start"] - begin,
                "transfer_seconds": seconds,
                "bytes_per_second": span["bytes"] / seconds if seconds > 0 else None,
            }
        )
    return found


def straggler(
    recording: Recording, measured: list[int], waiting: list[list[float]], step_seconds: float
) -> dict[str, Any] | None:
    """The rank for which the others wait, step after step; None where there is none.
    `waiting[step][rank]`: exposed waiting."""
    last: Counter[int] = Counter()
    for step in measured:
        ready = {
            rank: max(
                (s["start"] for s in _keyed(recording.spans(rank, step)).values()), default=0.0
            )
            for rank in range(recording.world_size)
        }
        # Late against those that it reduces with: where a stage is a process, the same stage of the
        # other replicas.
        stages = {rank["rank"]: rank.get("stage") for rank in recording.plan["ranks"]}
        late = {
            rank: at - min(ready[other] for other in ready if stages[other] == stages[rank])
            for rank, at in ready.items()
        }
        last[max(late, key=late.__getitem__)] += 1
    if recording.world_size < 2 or not measured:
        return None
    rank, times = last.most_common(1)[0]
    waited = statistics.median(max(ranks[:rank] + ranks[rank + 1 :]) for ranks in waiting)
    if waited < LATE_SHARE * step_seconds or times < LATE_STEPS * len(measured):
        return None
    return {
        "rank": rank,
        "waited_seconds": waited,
        "share_of_step": waited / step_seconds,
        "last_in": times,
        "of": len(measured),
    }


def _bubble(recording: Recording, measured: list[int]) -> dict[str, float] | None:
    """Idle share of the stages between the first forward and the last backward of a pass, measured
    and ideal."""
    stages, micro_batches = recording.plan["stages"], recording.plan["micro_batches"]
    if stages < 2:
        return None
    pipelines = [spans for step in measured for spans in pipelines_of(recording, step)]
    shares = [share for spans in pipelines for share in pass_bubbles(spans, stages)]
    ideal = ideal_bubble(stages, micro_batches, recording.plan.get("schedule") or "gpipe")
    return {"measured": statistics.median(shares), "ideal": ideal} if shares else None


def pipelines_of(recording: Recording, step: int) -> list[list[Event]]:
    """What the stages of every replica did in a step: the spans of one rank, or of several where a
    stage is a process of its own.

    Ranks of one pipeline synchronize after their passes, each when it is done: what the others
    compute meanwhile is not clipped."""
    if not recording.plan.get("schedule"):
        return [recording.spans(rank, step) for rank in range(recording.world_size)]
    ranks: dict[int, list[Event]] = {}
    for rank in recording.plan["ranks"]:
        passes = [
            span
            for span in recording.spans(rank["rank"], step)
            if span["event"] in ("forward", "backward")
        ]
        ranks.setdefault(rank["replica"], []).extend(passes)
    return list(ranks.values())


def pass_bubbles(spans: Sequence[Event], stages: int) -> list[float]:
    """The idle share of every pass (accumulation step) through the stages."""
    found = []
    for number in sorted({span.get("accumulation", 0) for span in spans if "micro" in span}):
        mine = [s for s in spans if s.get("accumulation", 0) == number or s["event"] in COLLECTIVES]
        work = [*_intervals(mine, "forward"), *computing(mine)]
        window = max(end for _, end in work) - min(start for start, _ in work)
        found.append(
            1 - sum(end - start for start, end in work) / (stages * window) if window else 0.0
        )
    return found


def _busy(recording: Recording, measured: list[int]) -> list[dict[str, Any]]:
    """Seconds per step in which each device of each rank had work, and as a share of the step."""
    found = []
    for rank in recording.plan["ranks"]:
        for number, device in enumerate(dict.fromkeys(d["name"] for d in rank["devices"])):
            seconds = [
                _device_seconds(recording, rank["rank"], step, device, number == 0)
                for step in measured
            ]
            shares = [
                s / recording.seconds_of(recording.step(step))
                for s, step in zip(seconds, measured, strict=True)
            ]
            found.append(
                {
                    "rank": rank["rank"],
                    "device": device,
                    "seconds": _median(seconds),
                    "share": _median(shares),
                }
            )
    return found


def _device_seconds(recording: Recording, rank: int, step: int, device: str, first: bool) -> float:
    """What a device computed, copied and updated. What names no device (copying, the optimizer) is
    done by the first one."""
    spans = recording.spans(rank, step)
    if recording.plan["strategy"] == "dp" and recording.plan["device"] == "cpu":
        own = _intervals(
            [s for s in spans if s.get("device") == device], "replica_forward", "replica_backward"
        )
        return length([*own, *_intervals(spans, *IN_PROCESS, "optimizer")] if first else own)
    mine = [s for s in spans if s.get("device", device) == device]
    work = without([*_intervals(mine, "forward"), *computing(mine)], blocked(spans))
    return length([*work, *_intervals(spans, "optimizer")] if first else work)


def _balance(recording: Recording, measured: list[int]) -> float | None:
    """Busy time of the first device over the mean of the others: 1 is balanced, more means that
    device 0 carries more."""
    if recording.plan["strategy"] == "dp" and recording.plan["device"] == "cuda":
        return None  # what the replicas on other GPUs do is not seen from the events; NVML's load tells
    seconds = [device["seconds"] for device in _busy(recording, measured)]
    if len(seconds) < 2 or any(value is None for value in seconds):
        return None
    return _ratio(seconds[0], statistics.mean(seconds[1:]))


def _load(recording: Recording) -> dict[str, Any]:
    """Mean load while it trained: cores per rank, and per GPU what NVML said."""
    cpu: dict[int, float] = {}
    gpu: dict[str, list[float]] = {}
    memory: dict[str, list[int]] = {}
    for rank in range(recording.world_size):
        samples = [
            event
            for event in recording.named("load", rank)
            if _while_training(recording, event["time"])
        ]
        if samples:
            cpu[rank] = statistics.mean(event["cpu_share"] for event in samples)
        for event in samples:
            for device in event["devices"]:
                if device.get("utilization") is not None:
                    gpu.setdefault(device["device"], []).append(device["utilization"])
                    memory.setdefault(device["device"], []).append(device["used_bytes"])
    reasons = {
        event["not_measured"] for event in recording.named("load") if "not_measured" in event
    }
    if not cpu:
        reasons.add("too short a run: load is sampled every 0.1 s")
    return {
        "cores_per_rank": [cpu.get(rank) for rank in range(recording.world_size)],
        "gpu": [
            {
                "device": device,
                "utilization": statistics.mean(values),
                "used_bytes": max(memory[device]),
            }
            for device, values in sorted(gpu.items())
        ],
        "not_measured": "; ".join(sorted(reasons)) or None,
    }


def _while_training(recording: Recording, moment: float) -> bool:
    timed = recording.timed
    return (
        bool(timed)
        and min(e["start"] for e in timed[0]) <= moment <= max(e["end"] for e in timed[-1]) + 0.3
    )


def _flops(recording: Recording, step_seconds: float | None) -> dict[str, Any]:
    """Model FLOP/s: the arithmetic that the model needs, whatever the machine did, over the step
    time."""
    per_sample = recording.manifest["workload"].get("flops_per_sample")
    if not per_sample or not step_seconds:
        why = "no FLOP are counted: recurrent layers, or no matrix product at all"
        return {"per_second": None, "share_of_peak": None, "not_measured": why}
    per_second = per_sample * recording.plan["batch_size"] / step_seconds
    machine = recording.manifest["machine"]
    devices = {d["torch"] for rank in recording.plan["ranks"] for d in rank["devices"]}
    name = machine["gpus"][0]["name"] if recording.plan["device"] == "cuda" else machine["cpu"]
    peak = PEAKS[name].of(recording.plan["precision"]) if name in PEAKS else None
    known = (
        {"peak_per_second": peak * len(devices), "source": PEAKS[name].source}
        if peak
        else {"peak_per_second": None}
    )
    reason = None if peak else f"no {recording.plan['precision']} peak is known for {name!r}"
    share = per_second / (peak * len(devices)) if peak else None
    return {"per_second": per_second, "share_of_peak": share, **known, "not_measured": reason}


def _gradients(recording: Recording) -> dict[str, Any] | None:
    """The first step's gradients of the first replica: how many are zero, how many not finite."""
    ranks = [
        r["rank"]
        for r in recording.plan["ranks"]
        if r["rank"] == 0 or (r.get("stage") and not r["replica"])
    ]
    found = [event for rank in ranks for event in recording.named("gradients", rank)]
    sums = {key: sum(event[key] for event in found) for key in ("total", "zeros", "not_finite")}
    return sums | {"scale": found[0].get("scale")} if found else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else value / whole
