"""The metrics of a run as types; docs/metrics.md defines every number."""

from __future__ import annotations

from paralab.record.types import Record


class Parts(Record, frozen=True, kw_only=True):
    """What a step consists of, in seconds; None if no details of a step were kept."""

    forward_seconds: float | None
    backward_seconds: float | None
    compute_seconds: float | None
    optimizer_seconds: float | None
    communication_seconds: float | None
    exposed_communication_seconds: float | None
    waiting_seconds: float | None
    exposed_waiting_seconds: float | None
    other_seconds: float | None


class RankParts(Parts, frozen=True, kw_only=True):
    rank: int


class Bucket(Record, frozen=True, kw_only=True):
    """One collective of the last measured step, on rank 0's clock."""

    kind: str
    stage: int
    bucket: int
    bytes: int
    ready_seconds: float  # after the start of the step
    transfer_seconds: float
    bytes_per_second: float | None


class Straggler(Record, frozen=True, kw_only=True):
    """The rank that the others wait for, step after step."""

    rank: int
    waited_seconds: float
    share_of_step: float
    last_in: int  # steps in which it was the last one
    of: int  # steps


class Bubble(Record, frozen=True, kw_only=True):
    """Idle share of the stages between the first forward and the last backward pass."""

    measured: float
    ideal: float


class Busy(Record, frozen=True, kw_only=True):
    """How long a device worked, per step and as a share of the step."""

    rank: int
    device: str
    seconds: float | None
    share: float | None


class GpuLoad(Record, frozen=True, kw_only=True):
    device: str
    utilization: float
    used_bytes: int


class MeanLoad(Record, frozen=True, kw_only=True):
    """Mean load during training: cores per rank, and what NVML reports per GPU."""

    cores_per_rank: list[float | None]
    gpu: list[GpuLoad]
    not_measured: str | None


class Flops(Record, frozen=True, kw_only=True):
    """Model FLOP/s: the arithmetic that the model needs, divided by the step time."""

    per_second: float | None
    share_of_peak: float | None
    not_measured: str | None
    peak_per_second: float | None = None
    source: str | None = None


class GradientCounts(Record, frozen=True, kw_only=True):
    """Gradients of the first step, of the first replica."""

    total: int
    zeros: int
    not_finite: int
    scale: float | None


class Metrics(Parts, frozen=True, kw_only=True):
    """None if a number cannot be known; `not_measured` has the reason."""

    steps_measured: int
    overlap: float | None  # share of the communication that is hidden behind computation
    communication_share: float | None  # of the step
    exposed_share: float | None
    keeps_rule: bool | None  # communication below a tenth of the step
    data_seconds: float | None
    data_wait_seconds: float | None
    per_rank: list[RankParts]
    buckets: list[Bucket]
    straggler: Straggler | None
    bubble: Bubble | None
    busy: list[Busy]
    balance: float | None  # busy time of the first device over the mean of the others
    load: MeanLoad
    flops: Flops
    gradients: GradientCounts | None
    not_measured: dict[str, str]
