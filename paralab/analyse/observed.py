"""What the events of one run show beyond its metrics: passes, DataParallel's copying, when in the
backward pass a bucket is ready.

One synchronized step of a rank with three micro-batches in two stages; the all-reduce of a stage
may begin only in its last one:

    stage 0                         [B0][B1][   B2  ]
    stage 1            [B0][B1][  B2  ]
    all-reduces                      1↑            0↑        2 begun in the last backward pass, 0 before it
"""

from __future__ import annotations

import statistics
from typing import Any

from paralab.analyse.metrics import IN_PROCESS, REDUCES
from paralab.analyse.recording import Recording
from paralab.record.reader import Event


def observed(recording: Recording) -> dict[str, Any]:
    """Plain numbers; of rank 0 and the last step where one example is enough, medians of all timed
    steps where it is a time."""
    steps = [step[0]["step"] for step in recording.timed if recording.spans(0, step[0]["step"])]
    last = recording.spans(0, steps[-1]) if steps else []
    return {
        "passes": passes(last),
        "copying": {
            kind: found for kind in IN_PROCESS if (found := copying(recording, steps, kind))
        },
        "buckets": [bucket(event, last) for event in _all_reduces(last)],
        "all_reduces_by_pass": by_pass(last),
        "loss_parts": [event["loss"] for event in recording.steps[0]] if recording.steps else [],
        "optimizer_steps": sum(event["event"] == "optimizer" for event in last),
        "steps": len(recording.steps),
        "status": recording.status,
        "threads_per_device": recording.plan["threads_per_device"],
        "stage_bytes": [part["parameter_bytes"] for part in recording.plan["stage_parts"]],
        "loss_scale": recording.plan["loss_scale"],
    }


def passes(spans: list[Event]) -> dict[str, Any]:
    """How often the model was run forward and backward in one step; samples go through all stages
    in one pass."""
    forward, backward = (
        [
            (s.get("accumulation", 0), s.get("micro", 0), s.get("stage", 0))
            for s in spans
            if s["event"] == name
        ]
        for name in ("forward", "backward")
    )
    stages = {stage for _, _, stage in forward}
    return {
        "forward": len({(a, m) for a, m, _ in forward}),
        "backward": len({(a, m) for a, m, _ in backward}),
        "stages": len(stages),
        "micro_batches": len({micro for _, micro, _ in forward}),
    }


def copying(recording: Recording, steps: list[int], kind: str) -> dict[str, Any] | None:
    """Seconds and bytes per step of one kind of DataParallel's copying."""
    per_step = [[s for s in recording.spans(0, step) if s["event"] == kind] for step in steps]
    if not any(per_step):
        return None
    return {
        "seconds": statistics.median(
            sum(s["end"] - s["start"] for s in spans) for spans in per_step
        ),
        "bytes": sum(s["bytes"] for s in per_step[-1])
        if all("bytes" in s for s in per_step[-1])
        else None,
        "times": len(per_step[-1]),
    }


def _all_reduces(spans: list[Event]) -> list[Event]:
    return sorted((s for s in spans if s["event"] in REDUCES), key=lambda s: float(s["start"]))


def bucket(event: Event, spans: list[Event]) -> dict[str, Any]:
    """When one all-reduce began, as a share of its step's last backward pass in its stage: 0 its
    start, 1 its end."""
    stage = event.get("stage", 0)
    own = [s for s in spans if s["event"] == "backward" and s.get("stage", 0) == stage]
    around = [s for s in own if s["start"] <= event["start"] <= s["end"]]
    final = max(own, key=lambda s: float(s["start"]))
    during = around[0] if around else final
    length = during["end"] - during["start"]
    return {
        "stage": stage,
        "bytes": event["bytes"],
        "share_of_backward": (event["start"] - during["start"]) / length if length else 0.0,
        "in_last_pass": event["start"] >= final["start"],
        "passes_done_before": sum(s["end"] <= event["start"] for s in own),
    }


def by_pass(spans: list[Event]) -> list[int]:
    """All-reduces that began in each backward pass (accumulation step) of a step: with no_sync() 0
    0 0 2."""
    numbers = sorted({s.get("accumulation", 0) for s in spans if s["event"] == "backward"})
    found = []
    for number in numbers:
        own = [s for s in spans if s["event"] == "backward" and s.get("accumulation", 0) == number]
        begin, end = min(s["start"] for s in own), max(s["end"] for s in own)
        found.append(sum(begin <= s["start"] <= end for s in _all_reduces(spans)))
    return found
