"""The numbers of a run, from its folder alone: what `paralab run --json` prints."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paralab.analyse.metrics import metrics_of
from paralab.analyse.recording import Recording
from paralab.record.reader import Event, failures_of
from paralab.units import plural

# What a result must have to be shown.
NEEDED = {
    "status",
    "step_seconds",
    "losses",
    "metrics",
    "ranks",
    "grid",
    "batch",
    "samples_per_step",
    "warnings",
}


def result_of(folder: Path) -> dict[str, Any]:
    """The result object (docs/run-folder.md lists its fields). Unknown is None, and a warning says
    why.

    It is computed from the events. Where some of these cannot be read any more, the numbers of
    result.json are kept, which were computed while they could."""
    recording = Recording.read(folder)
    kept = _kept(folder)
    if not recording.damaged and (kept is None or kept["steps"] <= len(recording.steps)):
        return _computed(recording)
    lost = [
        f"{plural(lines, 'line')} of rank {rank}'s events cannot be read"
        for rank, lines in recording.damaged.items()
    ]
    try:
        computed = _computed(recording)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
    ):  # what is left does not fit together
        if kept is None:
            raise
        computed = {}
    if kept is None:
        return computed | {"warnings": [*computed["warnings"], *lost]}
    lost.append("the numbers are those of result.json, because the events are damaged")
    return computed | kept | {"run_folder": str(folder), "warnings": [*kept["warnings"], *lost]}


def _kept(folder: Path) -> dict[str, Any] | None:
    """What was written when the run ended; None if it is not there, or not whole."""
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_bytes())
        return result if isinstance(result["steps"], int) and result.keys() >= NEEDED else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _computed(recording: Recording) -> dict[str, Any]:
    folder = recording.folder
    manifest, plan, events = recording.manifest, recording.plan, recording.events
    steps, timed = recording.steps, recording.timed
    warnings = list(plan["remarks"])
    if steps and len(steps) < 2:
        warnings.append("a single step is no measurement: its time includes the warm-up")
    losses = [sum(event["loss"] for event in step) for step in steps]
    bad = next(
        (
            step[0]["step"]
            for step, loss in zip(steps, losses, strict=True)
            if not math.isfinite(loss)
        ),
        None,
    )
    if bad is not None:
        warnings.append(f"the loss is not finite from step {bad} on")
    if recording.status == "failed":
        warnings.append("the run failed")
    if recording.begun_at:
        warnings.append(f"resumed: the first {recording.begun_at} steps were done before this run")
    if recording.reached < plan["num_steps"]:
        warnings.append(f"only {recording.reached} of {plan['num_steps']} steps were finished")
    failures = failures_of(folder)
    warnings += [
        f"attempt {failure['attempt'] + 1} failed: {failure['problem']}" for failure in failures
    ]
    skipped = sum(bool(step[0].get("skipped")) for step in steps)
    if skipped:
        warnings.append(
            f"GradScaler skipped {skipped} of {len(steps)} optimizer steps: the fp16 gradients overflowed"
        )
    return {
        "schema": manifest["schema"],
        "strategy": plan["strategy"],
        "workload": manifest["workload"]["name"],
        "status": recording.status,
        "grid": {"replicas": plan["replicas"], "stages": plan["stages"], "devices": _devices(plan)},
        "schedule": plan.get("schedule"),
        "ranks": _ranks(plan, events),
        "batch": {
            "size": plan["batch_size"],
            "arithmetic": plan["arithmetic"],
            "accumulate": plan["accumulate"],
            "micro_batches": plan["micro_batches"],
        },
        "precision": plan["precision"],
        "device": plan["device"],
        "threads_per_device": plan["threads_per_device"],
        "steps": len(steps),
        "begun_at_step": recording.begun_at,
        "reached_step": recording.reached,
        "restarts": len(failures) - (recording.status == "failed") if failures else 0,
        "saves": _saves(recording),
        "skipped_steps": skipped,
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
        "step_seconds": spread(recording.step_seconds),
        "warm_up_steps": recording.warm_up,
        "total_seconds": _rounded(_between(steps)),
        "samples_per_second": _samples_per_second(timed),
        "samples_per_step": _samples_per_step(timed),
        "samples_per_second_per_device": _per_device(
            _samples_per_second(timed), len(_devices(plan))
        ),
        "peak_bytes": _memory(events),
        "all_reduces_per_step": _per_step(timed, "all_reduces"),
        "all_gathers_per_step": _per_step(timed, "all_gathers"),
        "reduce_scatters_per_step": _per_step(timed, "reduce_scatters"),
        "bytes_per_step": _per_step(timed, "bytes"),
        "metrics": metrics_of(recording),
        "splits": _splits(events),
        "remarks": plan["remarks"],
        "differences": plan["differences"],
        "run_folder": str(folder),
        "warnings": warnings,
    }


def _saves(recording: Recording) -> dict[str, Any] | None:
    """The checkpoints that were made, as rank 0 saw them; None when none was asked for."""
    saves = recording.named("save", 0)
    if not saves:
        return None
    return {
        "number": len(saves),
        "last": saves[-1]["folder"],
        "blocked_seconds": statistics.median(save["blocked_seconds"] for save in saves),
        "seconds": statistics.median(save["seconds"] for save in saves),
    }


def _devices(plan: dict[str, Any]) -> list[str]:
    return list(
        dict.fromkeys(device["name"] for rank in plan["ranks"] for device in rank["devices"])
    )


def _ranks(plan: dict[str, Any], events: dict[int, list[Event]]) -> list[dict[str, Any]]:
    ranks = []
    for rank in plan["ranks"]:
        start = next(
            (event for event in events.get(rank["rank"], []) if event["event"] == "start"), {}
        )
        ranks.append(
            {
                "rank": rank["rank"],
                "local_rank": rank["local_rank"],
                "node": rank.get("node", ""),
                "pid": start.get("pid"),
                "devices": [device["name"] for device in rank["devices"]],
                "roles": [device["role"] for device in rank["devices"]],
                "virtual": any(device["virtual"] for device in rank["devices"]),
                "shared": any(device["shared"] for device in rank["devices"]),
                "samples_per_step": rank["samples_per_step"],
                "split": rank["split"],
                "replica": rank.get("replica", rank["rank"]),
                "stage": rank.get("stage"),
            }
        )
    return ranks


def spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "p10": None, "p90": None}
    return {
        "median": statistics.median(values),
        "p10": quantile(values, 0.1),
        "p90": quantile(values, 0.9),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the sorted values lies, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _between(steps: list[list[Event]]) -> float | None:
    """From the first step's start to the last one's end, over all ranks."""
    if not steps:
        return None
    return float(max(e["end"] for e in steps[-1]) - min(e["start"] for e in steps[0]))


def _samples_per_second(timed: list[list[Event]]) -> float | None:
    """Loading included: samples over the wall-clock time in which they were trained on."""
    elapsed = _between(timed)
    return sum(event["samples"] for step in timed for event in step) / elapsed if elapsed else None


def _samples_per_step(timed: list[list[Event]]) -> float | None:
    """What was trained on: less than the batch that was asked for where an epoch has fewer
    samples."""
    return (
        statistics.mean(sum(event["samples"] for event in step) for step in timed)
        if timed
        else None
    )


def _per_device(value: float | None, devices: int) -> float | None:
    return None if value is None else value / devices


def _memory(events: dict[int, list[Event]]) -> list[dict[str, Any]]:
    """The last word on every device of every rank; `how` tells the allocator's peak from counted
    tensors."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for rank, list_ in events.items():
        for event in list_:
            if event["event"] == "memory":
                kept = {key: value for key, value in event.items() if key not in ("event", "time")}
                found[rank, event["device"]] = {"rank": rank, **kept}
    return list(found.values())


def _per_step(timed: list[list[Event]], field: str) -> float | None:
    """Per optimizer step and rank."""
    return statistics.mean(step[0].get(field, 0) for step in timed) if timed else None


def _splits(events: dict[int, list[Event]]) -> list[dict[str, Any]]:
    """What arrived inside the model in the first step, per rank and device."""
    kept = ("device", "physical", "shape")
    return [
        {"rank": rank, **{key: event[key] for key in kept}}
        for rank, list_ in events.items()
        for event in list_
        if event["event"] == "split" and event["step"] == 0
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
