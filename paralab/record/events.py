"""Events that a rank writes during training, with one type for each kind of event.

A `Span` lasts from `start` to `end`, and a `Moment` happens at `time`. All times are seconds on a
clock that all ranks share. None means that the event has no such field or that the value is
unknown.
"""

import msgspec

from paralab.record.types import Record

REDUCES = ("all_reduce", "reduce_scatter")  # a backward pass waits for these at its end
COLLECTIVES = (*REDUCES, "all_gather", "all_to_all", "broadcast")


class Event(Record, frozen=True, kw_only=True):
    event: str  # the kind: `step`, `forward`, `load`, …


class Moment(Event, frozen=True, kw_only=True):
    time: float


class Span(Event, frozen=True, kw_only=True):
    """Part of a step: `forward`, `backward`, `optimizer`, `data`, DataParallel's copies, …"""

    step: int
    start: float
    end: float
    device: str | None = None
    stage: int | None = None
    micro: int | None = None  # micro-batch
    accumulation: int | None = None  # accumulation step
    replica: int | None = None
    bucket: int | None = None
    bytes: int | None = None
    # The submodule that fsdp gathers or reduces, or what shards send each other.
    unit: str | None = None
    blocking: bool | None = None  # whether the collective blocks the compute thread
    weights: bool | None = None  # whether this is the half of backward with only weight gradients
    scale: float | None = None  # GradScaler's loss scale

    def __post_init__(self) -> None:
        if self.start > self.end:
            raise ValueError(f"{self.event} ends before it starts")

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def interval(self) -> tuple[float, float]:
        return self.start, self.end


class Collective(Span, frozen=True, kw_only=True):
    bucket: int  # or the number of an fsdp unit, or of a collective between shards in this step
    bytes: int
    ranks: tuple[int, ...] | None = None  # the ranks that take part, or None for all


class Step(Span, frozen=True, kw_only=True):
    """One optimizer step on one rank. The ranks' losses add up to the batch's loss."""

    samples: int
    loss: float
    epoch: int = 0
    skipped: bool = False  # whether GradScaler skipped the step because gradients overflowed
    all_reduces: int = 0
    all_gathers: int = 0
    reduce_scatters: int = 0
    all_to_alls: int = 0
    broadcasts: int = 0
    bytes: int = 0


class Start(Moment, frozen=True, kw_only=True):
    pid: int
    devices: list[str]
    rank: int | None = None
    local_rank: int | None = None
    node: str = ""
    clock_offset_seconds: float | None = None
    clock_uncertainty_seconds: float | None = None
    unix_seconds: float = 0.0
    torch: str | None = None


class Memory(Moment, frozen=True, kw_only=True):
    """Peak device memory. `how` is how we measured: CUDA's allocator, or counted tensors."""

    device: str
    bytes: int
    how: str
    parameters: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    activations: int | None = None
    gathered: int | None = None  # fsdp: gathered parameters
    unreduced: int | None = None  # fsdp: gradients not reduced yet
    process_bytes: int | None = None


class DeviceLoad(Record, frozen=True, kw_only=True):
    device: str
    utilization: float | None = None
    used_bytes: int | None = None
    allocated_bytes: int | None = None


class Load(Moment, frozen=True, kw_only=True):
    cpu_share: float  # the number of cores in use
    waiting_threads: float | None = None  # threads that could run but wait for a core, on average
    rss_bytes: int | None
    devices: list[DeviceLoad]
    not_measured: str | None = None


class Gradients(Moment, frozen=True, kw_only=True):
    """How many gradients in the first step are zero or not finite."""

    total: int
    zeros: int
    not_finite: int
    step: int = 0
    scale: float | None = None


class Compile(Moment, frozen=True, kw_only=True):
    """How many graphs were compiled, and how many calls of blocks ran without compiled code."""

    graphs: int
    calls: int
    eager_calls: int


class SplitShape(Moment, frozen=True, kw_only=True):
    """The shape of the model's input on one device."""

    step: int
    device: str
    physical: str
    shape: list[int]


class Save(Moment, frozen=True, kw_only=True):
    step: int
    folder: str
    blocked_seconds: float
    seconds: float


class Resume(Moment, frozen=True, kw_only=True):
    step: int
    folder: str | None = None
    same_topology: bool | None = None


class Error(Moment, frozen=True, kw_only=True):
    error: str
    detail: str | None = None
    traceback: str | None = None


class End(Moment, frozen=True, kw_only=True):
    status: str  # completed, failed, interrupted, stopped (and saved)


Exact = float | str  # JSON has no NaN or infinity, so these are strings


class Verify(Moment, frozen=True, kw_only=True):
    """One rank's results compared with a single device's (`paralab.worker.verify`)."""

    parameter_error: Exact
    parameter_error_of_update: Exact
    worst_parameter: str
    gradient_error: Exact
    gradient_size: Exact
    missing_gradients: list[str]
    gradient_factor: Exact
    gradient_residual: Exact
    losses: list[Exact]
    reference_losses: list[Exact]
    digest: str
    of: int  # the number of parameters in the reference
    compared: int | None = None  # the number of parameters that this rank compared
    stage: int | None = None
    shard: int | None = None
    extra_gradients: tuple[str, ...] = ()
    buffer_errors: dict[str, Exact] = msgspec.field(default_factory=dict)


_NAMED = (Step, Start, Memory, Load, Gradients, Compile, Save, Resume, Error, End, Verify)
_SPANS = "data forward backward optimizer scatter replicate gather reduce".split()
_SPANS += ["replica_forward", "replica_backward"]
KINDS: dict[str, type[Event]] = {
    **{kind.__name__.lower(): kind for kind in _NAMED},
    **dict.fromkeys(COLLECTIVES, Collective),
    **dict.fromkeys(_SPANS, Span),
    "split": SplitShape,
}
