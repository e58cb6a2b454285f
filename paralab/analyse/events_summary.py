"""Summarize what a run's events show beyond its metrics: passes, DataParallel copies, and when each
bucket is ready in the backward pass.

The diagram shows one synchronized step on one rank, with three micro-batches and two stages. A
stage's all-reduce can start only in its last backward pass:

    stage 0                         [B0][B1][   B2  ]
    stage 1            [B0][B1][  B2  ]
    all-reduces                      1↑            0↑     2 start in the last backward pass
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from paralab.analyse.metrics import IN_PROCESS, collectives
from paralab.analyse.recording import Recording
from paralab.record.events import REDUCES, Collective, Span
from paralab.record.types import Record


class Passes(Record, frozen=True, kw_only=True):
    """How many times the model ran in one step. One pass takes samples through all stages."""

    forward: int
    backward: int
    stages: int
    micro_batches: int


class BucketStart(Record, frozen=True, kw_only=True):
    """When an all-reduce started, as a fraction of its backward pass."""

    bytes: int
    share_of_backward: float


class EventsSummary(Record, frozen=True, kw_only=True):
    """A summary of the last step on rank 0."""

    passes: Passes
    copying: dict[str, float]  # kind of DataParallel copy -> its median seconds per step
    buckets: list[BucketStart]
    all_reduces_by_pass: list[int]
    loss_parts: list[float]  # each rank's part of the first step's loss
    optimizer_steps: int
    steps: int
    status: str


def summarize(recording: Recording) -> EventsSummary:
    detailed = [recording.spans(0, step) for step in recording.detailed]
    last = detailed[-1] if detailed else []
    return EventsSummary(
        passes=_count_passes(last),
        copying={
            kind: statistics.median(
                sum(s.seconds for s in spans if s.event == kind) for spans in detailed
            )
            for kind in IN_PROCESS
            if any(span.event == kind for spans in detailed for span in spans)
        },
        buckets=[_bucket_start(event, last) for event in _reduces(last)],
        all_reduces_by_pass=_reduces_by_pass(last),
        loss_parts=[event.loss for event in recording.steps[0]] if recording.steps else [],
        optimizer_steps=sum(event.event == "optimizer" for event in last),
        steps=len(recording.steps),
        status=recording.status,
    )


def _count_passes(spans: Sequence[Span]) -> Passes:
    forward, backward = (
        {(s.accumulation or 0, s.micro or 0) for s in spans if s.event == name}
        for name in ("forward", "backward")
    )
    return Passes(
        forward=len(forward),
        backward=len(backward),
        stages=len({span.stage or 0 for span in spans if span.event == "forward"}),
        micro_batches=len({micro for _, micro in forward}),
    )


def _reduces(spans: Sequence[Span]) -> list[Collective]:
    reduces = [span for span in collectives(spans) if span.event in REDUCES]
    return sorted(reduces, key=lambda span: span.start)


def _bucket_start(event: Collective, spans: Sequence[Span]) -> BucketStart:
    own = [s for s in spans if s.event == "backward" and (s.stage or 0) == (event.stage or 0)]
    around = [s for s in own if s.start <= event.start <= s.end]
    during = (around or sorted(own, key=lambda span: -span.start))[0]
    done = (event.start - during.start) / during.seconds if during.seconds else 0.0
    return BucketStart(bytes=event.bytes, share_of_backward=done)


def _reduces_by_pass(spans: Sequence[Span]) -> list[int]:
    """Count the all-reduces that started in each accumulation step: 0 0 0 2 with no_sync()."""
    passes: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.event == "backward":
            passes[span.accumulation or 0].append(span)
    windows = (
        (min(s.start for s in own), max(s.end for s in own)) for _, own in sorted(passes.items())
    )
    return [sum(begin <= s.start <= end for s in _reduces(spans)) for begin, end in windows]
