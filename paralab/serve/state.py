"""The state of a run that the live page shows, as plain numbers and charts."""

from collections.abc import Mapping
from typing import Literal

from paralab.analyse import figures
from paralab.analyse.blocks import Line, Lines, Timeline
from paralab.analyse.manifest import RunManifest
from paralab.analyse.recording import Recording, median, warm_up_steps
from paralab.doctor.registry import Finding
from paralab.plan.plan import label
from paralab.record.folder import RunFolder
from paralab.record.reader import read_failures
from paralab.record.types import Record
from paralab.serve.status import IS_OVER, Status
from paralab.show.follow import (
    RECENT_STEPS,
    Follower,
    MemoryUse,
    RankProgress,
    Share,
    Times,
    samples_per_second,
)
from paralab.units import age

WORTH_SAYING_SECONDS = 10.0  # a shorter silence is normal
RankStatus = Literal["not started", "running", "gone", "ended", "failed", "not visible"]


class DeviceState(Record, frozen=True, kw_only=True):
    name: str
    load: Share | None
    memory: MemoryUse | None


class RankState(Record, frozen=True, kw_only=True):
    rank: int
    pid: int | None
    status: RankStatus
    step: int  # finished steps
    step_seconds: float | None
    data_seconds: float | None
    communication_share: float | None
    devices: tuple[DeviceState, ...]


class Snapshot(Record, frozen=True, kw_only=True):
    """Everything that the live page shows. Unknown numbers are None."""

    configuration: str
    workload: str
    batch: str
    status: Status
    sentence: str  # how the run is doing or how it ended
    step: int
    num_steps: int
    restarts: int
    loss: float | None
    step_seconds: float | None
    samples_per_second: float | None
    seconds_left: float | None
    ranks: tuple[RankState, ...]
    losses: Lines | None
    step_times: Lines | None
    timeline: Timeline | None
    findings: tuple[Finding, ...]
    doctor_note: str  # why there are no findings yet


def snapshot_of(
    follower: Follower,
    manifest: RunManifest,
    folder: RunFolder,
    status: Status,
    silent_seconds: float,
    running: Mapping[int, bool | None],
    findings: tuple[Finding, ...],
    doctor_note: str,
) -> Snapshot:
    """Describe the run, based on what the follower has read so far."""
    losses, ranks, shown = follower.losses, follower.ranks, _shown_steps(follower, status)
    failures = read_failures(folder.path)  # the launcher's explanations
    problem = failures[-1].problem if failures else ""
    recent = {rank.plan.rank: rank.recent_events for rank in ranks}
    lengths = {number: step.end - step.start for number, step in follower.times_of.items()}
    is_training = status in ("starting", "running")
    return Snapshot(
        configuration=label(follower.plan),
        workload=manifest.workload.name,
        batch=follower.plan.arithmetic,
        status=status,
        sentence=describe(status, follower, silent_seconds, problem),
        step=follower.done,
        num_steps=follower.plan.num_steps,
        restarts=follower.attempt,
        loss=losses[-1] if losses else None,
        step_seconds=median([step.end - step.start for step in shown]),
        samples_per_second=samples_per_second(shown),
        seconds_left=follower.seconds_left if is_training else None,
        ranks=tuple(_rank(follower, each, running.get(each.plan.rank)) for each in ranks),
        losses=_curve("Loss", follower.loss_of, "loss of the global batch", "number"),
        step_times=_curve("Step time", lengths, "step time", "seconds"),
        timeline=figures.timeline(Recording(folder.path, manifest, recent)),
        findings=findings,
        doctor_note=doctor_note,
    )


def _shown_steps(follower: Follower, status: Status) -> list[Times]:
    """Return the latest steps or, once the run is over, the steps that the report shows."""
    times = list(follower.times_of.values())
    begin = warm_up_steps(len(times)) if status in IS_OVER else max(0, len(times) - RECENT_STEPS)
    return times[begin:]


def describe(status: Status, follower: Follower, silent_seconds: float, problem: str) -> str:
    """Say how the run is doing, or how it ended."""
    done = f"after {follower.done} of {follower.plan.num_steps} steps"
    silent = f"The last event was {age(silent_seconds)} ago."
    if status in ("starting", "not started"):
        return "No rank has started yet."
    if status == "running":
        return silent if silent_seconds > WORTH_SAYING_SECONDS else ""
    if status == "completed":
        return f"Completed all {follower.plan.num_steps} steps."
    if status == "stopped":
        return f"Stopped {done}, with a checkpoint. Continue with `--resume`."
    if status == "interrupted":
        return f"Interrupted {done}."
    if status == "failed":
        why = problem or _first_error(follower)
        return f"Failed {done}. {_end(why)}" if why else f"Failed {done}."
    if status == "silent":
        return f"{silent} The ranks run on another machine, so paralab cannot see their processes."
    gone = "The ranks' processes are gone, and they did not record an end."
    return f"Killed {done}. {_end(problem) if problem else gone} {silent}"


def _end(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?", ")", "`")) else f"{sentence}."


def _first_error(follower: Follower) -> str:
    errors = [(rank.error, rank.plan.rank) for rank in follower.ranks if rank.error]
    first = min(errors, key=lambda pair: pair[0].time, default=None)
    return f"Rank {first[1]}: {first[0].error}" if first else ""


def _rank(follower: Follower, rank: RankProgress, is_running: bool | None) -> RankState:
    return RankState(
        rank=rank.plan.rank,
        pid=rank.started.pid if rank.started else None,
        status=_rank_status(rank, is_running),
        step=next(reversed(rank.losses), -1) + 1,
        step_seconds=rank.step_seconds,
        data_seconds=rank.data_seconds,
        communication_share=follower.communication_share(rank.plan.rank),
        devices=tuple(
            DeviceState(name=name, load=rank.load_of(name), memory=rank.memory_of(name))
            for name in rank.devices
        ),
    )


def _rank_status(rank: RankProgress, is_running: bool | None) -> RankStatus:
    if rank.ended or rank.error:
        is_good = rank.ended is not None and rank.ended.status != "failed"
        return "ended" if is_good else "failed"
    if not rank.started:
        return "not started"
    return "not visible" if is_running is None else "running" if is_running else "gone"


def _curve(title: str, values: dict[int, float], y: str, unit: str) -> Lines | None:
    """Draw one value per step. The first step is 0, as in the timeline and in the report."""
    if not values:
        return None
    points = tuple((float(step), value) for step, value in values.items())
    return Lines(title, (Line(title, points),), "optimizer step", y, unit)
