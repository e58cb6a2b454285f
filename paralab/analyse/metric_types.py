"""Types for run metrics. docs/metrics.md defines each number."""

from msgspec import field

from paralab.record.types import Record


class Parts(Record, frozen=True, kw_only=True):
    """The parts of a step, in seconds. Each is None if no step details were recorded."""

    forward_seconds: float | None
    backward_seconds: float | None
    compute_seconds: float | None
    optimizer_seconds: float | None
    communication_seconds: float | None
    exposed_communication_seconds: float | None
    waiting_seconds: float | None
    exposed_waiting_seconds: float | None
    other_seconds: float | None
    skew_seconds: float | None = None  # time before this rank starts the step and after it finishes


class RankParts(Parts, frozen=True, kw_only=True):
    rank: int


class Bucket(Record, frozen=True, kw_only=True):
    """One collective in the last measured step, on rank 0's clock."""

    kind: str
    stage: int
    bucket: int
    # The submodule that fsdp gathers or reduces, or what shards send each other.
    unit: str | None = None
    bytes: int
    ready_seconds: float  # seconds since the start of the step
    ready_share: float | None = None  # `ready_seconds` as a share of this step
    transfer_seconds: float
    bytes_per_second: float | None


class StepShares(Record, frozen=True, kw_only=True):
    """The share of a step that ranks spend on each kind of work. The shares add up to 1."""

    forward: float
    backward: float
    optimizer: float
    exposed_communication: float
    waiting: float
    other: float
    skew: float


class Straggler(Record, frozen=True, kw_only=True):
    """The rank that the other ranks wait for in most steps."""

    rank: int
    waited_seconds: float
    share_of_step: float
    last_in: int  # the number of steps in which it was last
    of: int  # the total number of steps


class Bubble(Record, frozen=True, kw_only=True):
    """The idle share of all stages, from the first forward to the last backward pass."""

    measured: float
    ideal: float


class Busy(Record, frozen=True, kw_only=True):
    """A device's busy time, per step and as a share of the step."""

    rank: int
    device: str
    seconds: float | None
    share: float | None


class GpuLoad(Record, frozen=True, kw_only=True):
    device: str
    utilization: float
    used_bytes: int


class MeanLoad(Record, frozen=True, kw_only=True):
    """Mean load during training: cores in use per rank, threads per rank that wait for a core, and
    what NVML reports per GPU."""

    cores_per_rank: list[float | None]
    waiting_per_rank: list[float | None] = field(default_factory=list)
    gpu: list[GpuLoad]
    not_measured: str | None


class Flops(Record, frozen=True, kw_only=True):
    """Model FLOP/s: the FLOPs that the model needs, divided by the step time."""

    per_second: float | None
    share_of_peak: float | None
    not_measured: str | None
    peak_per_second: float | None = None
    source: str | None = None


class GradientCounts(Record, frozen=True, kw_only=True):
    """Gradient counts in the first step, on the first replica."""

    total: int
    zeros: int
    not_finite: int
    scale: float | None


class Metrics(Parts, frozen=True, kw_only=True):
    """All metrics of a run. An unknown number is None, and `not_measured` has the reason."""

    steps_measured: int
    overlap: float | None  # share of communication hidden behind computation
    communication_share: float | None  # as a share of the step
    exposed_share: float | None
    shares: StepShares | None = None
    keeps_rule: bool | None  # True if communication takes less than a tenth of the step
    data_seconds: float | None
    data_wait_seconds: float | None
    per_rank: list[RankParts]
    buckets: list[Bucket]
    straggler: Straggler | None
    bubble: Bubble | None
    busy: list[Busy]
    balance: float | None  # the first device's busy time divided by the mean of the others
    load: MeanLoad
    flops: Flops
    gradients: GradientCounts | None
    not_measured: dict[str, str]

    @property
    def data_seconds_between_steps(self) -> float:
        """How long a device waits for samples between steps. The rest of the gap is not loading."""
        return min(self.data_wait_seconds or 0.0, self.data_seconds or 0.0)
