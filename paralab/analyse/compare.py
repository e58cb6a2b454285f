"""Set-ups side by side, from an experiment's folder alone: what each took, against the first one,
and how sure that is."""

from __future__ import annotations

import json
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paralab.analyse.confidence import speed_up
from paralab.analyse.metrics import RULE
from paralab.analyse.recording import Recording
from paralab.analyse.result import result_of, spread
from paralab.errors import UsageError


def comparison_of(folder: Path) -> dict[str, Any]:
    """What `compare --json` prints; docs/metrics.md defines the numbers."""
    manifest = read_manifest(folder)
    path = folder / "outcome.json"
    outcome = (
        json.loads(path.read_text()) if path.exists() else _salvaged(folder, manifest["cases"])
    )
    return _compared(folder, manifest | outcome)


def _salvaged(folder: Path, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The outcome of an experiment whose launcher was killed: the rounds that every case has come
    through."""

    def is_whole(run: str) -> bool:
        return (folder / run / "manifest.json").exists() and Recording.read(
            folder / run
        ).status == "completed"

    rounds = [
        number
        for number in range(len(cases[0]["runs"]))
        if all(is_whole(case["runs"][number]) for case in cases)
    ]
    error = None if rounds else "it was killed before the first round was whole"
    kept = [
        case | {"runs": [case["runs"][number] for number in rounds], "error": error, "parity": None}
        for case in cases
    ]
    return {"cases": kept, "rounds": len(rounds)}


def _compared(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    rows = [_row(folder, entry) for entry in manifest["cases"]]
    baseline = next((row for row in rows if row["strategy"] == "single" and not row["error"]), None)
    baseline = baseline or next((row for row in rows if not row["error"]), None)
    for row in rows:
        row["speed_up"], row["efficiency"] = _against(row, baseline)
        row["loss_difference"] = _loss_difference(row, baseline)
    return {
        "kind": manifest["kind"],
        "about": manifest["about"],
        "workload": manifest["workload"],
        "machine": manifest["machine"],
        "packages": manifest["packages"],
        "command": manifest["command"],
        "rounds": manifest["rounds"],
        "baseline": baseline["name"] if baseline else None,
        "rows": rows,
        "left_out": manifest["left_out"],
        "run_folder": str(folder),
    }


def comparison_of_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """Runs that were made one by one, as one comparison: one round, so differences have no
    interval."""
    recordings = [Recording.read(folder) for folder in folders]
    manifests = [recording.manifest for recording in recordings]
    workloads = list(dict.fromkeys(manifest["workload"]["name"] for manifest in manifests))
    if len(workloads) > 1:
        raise UsageError(
            f"These runs train different workloads: {', '.join(workloads)}.",
            fix="runs of one workload",
        )
    entries = []
    for folder, manifest in zip(folders, manifests, strict=True):
        words = shlex.join(["paralab", *manifest["command"][1:]])
        entries.append(
            {
                "name": _run_name(manifest["plan"]),
                "command": words,
                "request": manifest["plan"],
                "runs": [str(folder)],
            }
        )
    names = [entry["name"] for entry in entries]
    for number, entry in enumerate(entries):
        if names.count(entry["name"]) > 1:
            entry["name"] += f" ({folders[number].name})"
    for entry, folder in zip(entries, folders, strict=True):
        result = result_of(folder)
        entry["error"] = None if result["steps"] else f"no step was finished ({result['status']})"
        entry["runs"] = entry["runs"] if result["steps"] else []
    whole = {"kind": "run", "about": {}, "rounds": 1, "left_out": [], "cases": entries}
    return _compared(Path(), manifests[0] | whole)


def _run_name(plan: dict[str, Any]) -> str:
    words = [plan["strategy"] + (f" ×{plan['replicas']}" if plan["replicas"] > 1 else "")]
    words += [f"{plan['stages']} stages"] if plan["stages"] > 1 else []
    words += [plan["schedule"]] if plan.get("schedule") else []
    words += [f"accumulate {plan['accumulate']}"] if plan["accumulate"] > 1 else []
    words += [plan["precision"]] if plan["precision"] != "fp32" else []
    return " · ".join(words)


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if not isinstance(manifest, dict):
            raise ValueError("its manifest is no object")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} is no folder of paralab: {error}.", fix="a folder under runs/"
        ) from error
    return manifest


def _row(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """One set-up: its rounds together."""
    results = [
        result
        for run in entry["runs"]
        if (result := result_of(folder / run))["step_seconds"]["median"] is not None
    ]
    request, first = entry["request"], results[0] if results else {}
    recordings = [Recording.read(folder / run) for run in entry["runs"]]
    seconds = [step for recording in recordings for step in recording.step_seconds]
    alone = len(results) == 1 and len(results[0]["losses"]) > len(
        recordings[0].steps
    )  # its events have lost some of its steps
    numbers = [r["step_seconds"]["median"] for r in results]
    devices = len(first.get("grid", {}).get("devices", [])) or None
    rate = _median([r["samples_per_second"] for r in results])
    return {
        "name": entry["name"],
        "command": entry["command"],
        "request": request,
        "strategy": request["strategy"],
        "precision": first.get("precision", request["precision"]),
        "accumulate": first.get("batch", {}).get("accumulate"),
        "error": entry["error"],
        "device": first.get("device", request.get("device", "auto")),
        "devices": devices,
        "threads_per_device": first.get("threads_per_device"),
        "processes": len(first.get("ranks", [])) or None,
        "ranks": first.get("ranks", []),
        "batch": first.get("batch"),
        "step_seconds": first["step_seconds"] if alone else spread(seconds),
        "round_seconds": numbers,
        "round_seconds_per_sample": [
            r["step_seconds"]["median"] / r["samples_per_step"] for r in results
        ],
        "total_seconds": _median([r["total_seconds"] for r in results]),
        "samples_per_second": rate,
        "samples_per_second_per_device": rate / devices if rate and devices else None,
        "all_reduces_per_step": first.get("all_reduces_per_step"),
        "all_gathers_per_step": first.get("all_gathers_per_step"),
        "reduce_scatters_per_step": first.get("reduce_scatters_per_step"),
        "bytes_per_step": first.get("bytes_per_step"),
        "peak_bytes": results[-1]["peak_bytes"] if results else [],  # every round holds the same
        "metrics": _metrics([r["metrics"] for r in results]),
        "losses": first.get("losses", []),
        "splits": first.get("splits", []),
        "not_finite_losses": sum(loss is None for r in results for loss in r["losses"]),
        "warnings": first.get("warnings", [])[len(first.get("remarks", [])) :],
        "skipped_steps": sum(r["skipped_steps"] for r in results),
        "parity": entry.get("parity"),
        "remarks": first.get("remarks", []),
        "differences": first.get("differences", []),
        "runs": entry["runs"],
    }


def _against(
    row: dict[str, Any], baseline: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, float | None]:
    """(speed-up in samples per second with its interval and verdict, efficiency: the speed-up per
    device)."""
    if (
        not baseline
        or row["error"]
        or row["request"]["workload"] != baseline["request"]["workload"]
    ):
        return None, None
    ratio = speed_up(baseline["round_seconds_per_sample"], row["round_seconds_per_sample"])
    verdict = "baseline" if row is baseline else ratio.verdict
    return {**asdict(ratio), "verdict": verdict}, ratio.value * baseline["devices"] / row["devices"]


def _loss_difference(row: dict[str, Any], baseline: dict[str, Any] | None) -> float | None:
    """The largest difference of a step's loss from the baseline's, relative to it: same weights,
    same samples."""
    if (
        not baseline
        or row["error"]
        or row["request"]["workload"] != baseline["request"]["workload"]
    ):
        return None
    return (
        loss_difference(row["losses"], baseline["losses"])
        if row["batch"]["size"] == baseline["batch"]["size"]
        else None
    )


def loss_difference(
    losses: Sequence[float | None], expected: Sequence[float | None]
) -> float | None:
    """Over the steps that both have. None where a loss that should be finite is not: no number
    tells how far off that is."""
    pairs = [(a, b) for a, b in zip(losses, expected, strict=False) if b]
    if any(a is None for a, _ in pairs):
        return None
    return max(
        (abs(a - b) / abs(b) for a, b in pairs if a is not None and b is not None), default=None
    )


def _metrics(rounds: list[dict[str, Any]]) -> Any:
    """The medians over the rounds. A name is not averaged: a straggler is one that most rounds
    name."""
    if not rounds:
        return None
    found = merged(rounds)
    share = found["communication_share"]
    late = [each["straggler"] for each in rounds if each["straggler"]]
    rank, times = (
        Counter(straggler["rank"] for straggler in late).most_common(1)[0] if late else (None, 0)
    )
    same = [straggler for straggler in late if straggler["rank"] == rank]
    return found | {
        "keeps_rule": share < RULE if share else None,
        "straggler": merged(same) | {"rank": rank} if 2 * times > len(rounds) else None,
    }


def merged(values: list[Any]) -> Any:
    """The same tree with the median of every number over the rounds. What is not a number is the
    first one's."""
    if not values:
        return None
    first = values[0]
    if isinstance(first, bool | str):
        return first
    if isinstance(first, dict):
        return {
            key: merged([v[key] for v in values if isinstance(v, dict) and v.get(key) is not None])
            for key in first
        }
    if isinstance(first, list):
        same = [v for v in values if isinstance(v, list) and len(v) == len(first)]
        return [merged([v[place] for v in same]) for place in range(len(first))]
    numbers = [v for v in values if isinstance(v, int | float)]
    return statistics.median(numbers) if numbers else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
