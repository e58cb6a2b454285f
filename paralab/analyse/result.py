"""Compute the run result that `paralab run --json` prints, using only the run folder."""

import math
import statistics
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse.metric_types import Metrics
from paralab.analyse.metrics import metrics_of
from paralab.analyse.recording import (
    Recording,
    count_samples,
    mean,
    median,
    quantiles,
    seconds_between,
)
from paralab.errors import UsageError
from paralab.plan.axes import Axis
from paralab.plan.plan import Plan
from paralab.record.events import Compile, Memory, Save, SplitShape, Start
from paralab.record.reader import Failure, read_failures
from paralab.record.types import Record, convert, read_object
from paralab.units import plural


class Grid(Record, frozen=True, kw_only=True):
    replicas: int
    stages: int
    shards: int
    devices: list[str]
    axes: tuple[Axis, ...]  # those with multiple ranks


class Rank(Record, frozen=True, kw_only=True):
    rank: int
    local_rank: int
    node: str
    pid: int | None
    devices: list[str]
    roles: list[str]  # one per device: `replica 0`, `stage 1`
    virtual: bool
    shared: bool
    samples_per_step: int
    split: list[int]
    replica: int
    stage: int | None
    shard: int | None


class Batch(Record, frozen=True, kw_only=True):
    size: int
    arithmetic: str  # `64 = 2 ranks × 4 accumulation steps × 8 samples`
    accumulate: int
    micro_batches: int


class Spread(Record, frozen=True, kw_only=True):
    median: float
    p10: float
    p90: float


class Saves(Record, frozen=True, kw_only=True):
    """Saved checkpoints, as seen by rank 0."""

    number: int
    last: str
    blocked_seconds: float  # training waits this long per save
    seconds: float


class PeakMemory(Record, frozen=True, kw_only=True):
    """A device's peak memory, measured by CUDA's allocator or by counting tensors (`how`).

    estimated_bytes   the plan's estimate of the same quantity, or None
    estimate_error    estimated ÷ measured − 1
    """

    rank: int
    device: str
    bytes: int
    how: str
    parameters: int | None
    gradients: int | None
    optimizer: int | None
    activations: int | None
    gathered: int | None
    unreduced: int | None
    process_bytes: int | None
    estimated_bytes: int | None = None
    estimate_error: float | None = None


class Split(Record, frozen=True, kw_only=True):
    """The input that a device received inside the model in the first step."""

    rank: int
    device: str
    physical: str
    shape: list[int]


class SlurmInfo(Record, frozen=True, kw_only=True):
    """Slurm's information about the job."""

    number: int
    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: str
    time_limit: str


NOT_FASTER = "a compiled step is not faster"


class Compilation(Record, frozen=True, kw_only=True):
    """The time that --compile costs in the first step, and how many steps it takes to recover it.

    A warm compile cache reduces the cost. `break_even_steps` is None if it is unknown or if the
    compiled step is not faster; `unknown` says why."""

    graphs: int
    calls: int
    eager_calls: int  # calls of blocks that ran without compiled code
    first_step_seconds: float
    extra_seconds: float | None  # the first step minus the median step
    eager_step_seconds: float | None = None
    break_even_steps: int | None = None
    unknown: str | None = "the same configuration without --compile was not measured"


class Numbers(Record, frozen=True, kw_only=True):
    """The numbers that a run and a row of a comparison have in common."""

    strategy: str
    precision: str
    device: str
    threads_per_device: int
    backend: str | None = None  # torch.distributed's backend; None in a single process
    ranks: list[Rank]
    batch: Batch
    samples_per_step: float | None  # less than the batch size if an epoch has fewer samples
    total_seconds: float | None
    samples_per_second: float | None
    samples_per_second_per_device: float | None
    all_reduces_per_step: float | None
    all_gathers_per_step: float | None
    reduce_scatters_per_step: float | None
    all_to_alls_per_step: float | None = 0.0
    broadcasts_per_step: float | None = 0.0
    bytes_per_step: float | None
    peak_bytes: list[PeakMemory]
    metrics: Metrics
    losses: list[float | None]
    splits: list[Split]
    warnings: list[str]
    skipped_steps: int
    remarks: list[str]
    differences: list[str]
    compilation: Compilation | None = None


class Result(Numbers, frozen=True, kw_only=True):
    """The result of a run. docs/run-folder.md explains the fields. An unknown value is None, and a
    warning says why."""

    schema: int
    workload: str
    status: str
    grid: Grid
    schedule: str | None
    steps: int
    begun_at_step: int
    reached_step: int
    restarts: int
    saves: Saves | None
    step_seconds: Spread | None
    warm_up_steps: int
    run_folder: str
    wall_seconds: float | None = None  # including process startup
    report: str | None = None  # the path of the page, if one was written
    memory_not_estimated: str | None = None  # why `peak_bytes` has no estimates, if the plan tried
    slurm: SlurmInfo | None = None
    smaller_steps: int = 0  # steps with an epoch's last, smaller batch; step_seconds excludes them


def result_of(folder: Path) -> Result:
    """Compute a run's result from its events, or read result.json if events are damaged."""
    recording = Recording.read(folder)
    saved = _saved_result(folder)
    lost = [
        f"{plural(lines, 'line')} in rank {rank}'s events cannot be read"
        for rank, lines in recording.damaged.items()
    ]
    if saved is None or (not lost and saved.steps <= len(recording.steps)):
        computed = _compute(recording)
        return replace(computed, warnings=[*computed.warnings, *lost])
    lost.append("the numbers come from result.json, because the events are damaged")
    return replace(saved, run_folder=str(folder), warnings=[*saved.warnings, *lost])


def _saved_result(folder: Path) -> Result | None:
    """Read the result.json of a finished run. Return None if it is missing or incomplete."""
    try:
        return convert(read_object(folder / "result.json"), Result, folder / "result.json")
    except UsageError:
        return None


def _compute(recording: Recording) -> Result:
    plan, steps, timed = recording.plan, recording.steps, recording.timed
    losses = recording.losses
    samples = sum(map(count_samples, timed))
    elapsed = seconds_between(timed)  # including data loading
    per_second = samples / elapsed if elapsed else None
    failures = read_failures(recording.folder)
    skipped = sum(any(event.skipped for event in step) for step in steps)
    devices = list(dict.fromkeys(device.name for rank in plan.ranks for device in rank.devices))
    return Result.like(
        plan,
        schema=recording.manifest.schema,
        workload=recording.manifest.workload.name,
        status=recording.status,
        grid=Grid.like(plan, devices=devices),
        ranks=_ranks(recording),
        batch=Batch.like(plan, size=plan.batch_size),
        steps=len(steps),
        begun_at_step=recording.begun_at,
        reached_step=recording.reached,
        restarts=len(failures) - (recording.status == "failed") if failures else 0,
        saves=_saves(recording),
        skipped_steps=skipped,
        losses=[loss if math.isfinite(loss) else None for loss in losses],
        step_seconds=spread(recording.step_seconds),
        warm_up_steps=recording.warm_up,
        total_seconds=round(seconds_between(steps), 6) if steps else None,
        samples_per_second=per_second,
        samples_per_step=count_samples(recording.full[0]) if recording.full else None,
        smaller_steps=len(timed) - len(recording.full),
        samples_per_second_per_device=per_second and per_second / len(devices),
        peak_bytes=_memory(recording),
        memory_not_estimated=_not_estimated(plan),
        all_reduces_per_step=mean([step[0].all_reduces for step in timed]),
        all_gathers_per_step=mean([step[0].all_gathers for step in timed]),
        reduce_scatters_per_step=mean([step[0].reduce_scatters for step in timed]),
        all_to_alls_per_step=mean([step[0].all_to_alls for step in timed]),
        broadcasts_per_step=mean([step[0].broadcasts for step in timed]),
        bytes_per_step=mean([step[0].bytes for step in timed]),
        metrics=metrics_of(recording),
        compilation=_compilation(recording),
        splits=[
            Split.like(event, rank=rank)
            for rank, event in recording.by_rank(SplitShape)
            if event.step == 0
        ],
        remarks=list(plan.remarks),
        differences=list(plan.differences),
        run_folder=str(recording.folder),
        warnings=[*plan.remarks, *_warnings(recording, losses, skipped, failures)],
    )


def _compilation(recording: Recording) -> Compilation | None:
    """Add up the calls of all ranks, which compile at the same time."""
    events = recording.of(Compile)
    if not events or not recording.steps:
        return None
    first = seconds_between(recording.steps[:1])
    # Without warm-up, the first step is the only full one.
    usual = median(recording.step_seconds) if recording.warm_up else None
    made = Compilation(
        graphs=max(event.graphs for event in events),
        calls=sum(event.calls for event in events),
        eager_calls=sum(event.eager_calls for event in events),
        first_step_seconds=first,
        extra_seconds=None if usual is None else first - usual,
    )
    return replace(made, unknown="no later step was timed") if usual is None else made


def _warnings(
    recording: Recording, losses: list[float], skipped: int, failures: list[Failure]
) -> list[str]:
    """List everything that a reader should know before trusting the numbers."""
    steps, planned = recording.steps, recording.plan.num_steps
    warnings = []
    if len(steps) == 1:
        warnings.append("a single step is not a measurement: its time includes the warm-up")
    elif recording.full and recording.full[0] is steps[0]:
        warnings.append(
            f"the first step is the only one with {count_samples(steps[0])} samples, so the step "
            "time includes the warm-up"
        )
    numbered = zip(steps, losses, strict=True)
    bad = next((step[0].step for step, loss in numbered if not math.isfinite(loss)), None)
    if bad is not None:
        warnings.append(f"the loss is not finite from step {bad} on")
    if recording.status == "failed":
        warnings.append("the run failed")
    if begun := recording.begun_at:
        warnings.append(f"resumed: the first {plural(begun, 'step')} ran before this run")
    if recording.reached < planned:
        warnings.append(f"only {recording.reached} of {plural(planned, 'step')} finished")
    warnings += [
        f"attempt {each.attempt + 1} failed: {each.problem.rstrip('.')}" for each in failures
    ]
    if skipped:
        number = f"{skipped} of {plural(len(steps), 'optimizer step')}"
        warnings.append(f"GradScaler skipped {number}: the fp16 gradients overflowed")
    return warnings


def _saves(recording: Recording) -> Saves | None:
    saves = recording.of(Save, 0)
    if not saves:
        return None
    blocked = statistics.median(save.blocked_seconds for save in saves)
    each = statistics.median(save.seconds for save in saves)
    return Saves(number=len(saves), last=saves[-1].folder, blocked_seconds=blocked, seconds=each)


def _ranks(recording: Recording) -> list[Rank]:
    pids = {rank: start.pid for rank, start in recording.by_rank(Start)}
    return [
        Rank.like(
            rank,
            pid=pids.get(rank.rank),
            devices=[device.name for device in rank.devices],
            roles=[device.role for device in rank.devices],
            virtual=any(device.virtual for device in rank.devices),
            shared=any(device.shared for device in rank.devices),
            split=list(rank.split),
        )
        for rank in recording.plan.ranks
    ]


def spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    deciles = quantiles(values, 10)
    return Spread(median=statistics.median(values), p10=deciles[0], p90=deciles[-1])


def _not_estimated(plan: Plan) -> str | None:
    if plan.memory is None:
        return None
    return plan.memory.not_estimated or (plan.memory.no_peak if plan.device == "cuda" else None)


def _memory(recording: Recording) -> list[PeakMemory]:
    """Return the last value for each device on each rank, next to the plan's estimate."""
    memory = recording.plan.memory
    estimates = {(each.rank, each.device): each for each in memory.devices} if memory else {}
    last = {
        (rank, event.device): (event, estimates.get((rank, event.device)))
        for rank, event in recording.by_rank(Memory)
    }
    peaks = []
    for (rank, _), (event, expected) in last.items():
        estimated = None
        if expected:
            estimated = expected.peak if event.how == "allocator" else expected.counted
        error = None
        if estimated is not None and event.bytes:
            error = round(estimated / event.bytes - 1, 6)
        peaks.append(
            PeakMemory.like(event, rank=rank, estimated_bytes=estimated, estimate_error=error)
        )
    return peaks
