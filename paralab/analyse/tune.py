"""What a search found, from its folder: the command to use, how much faster it is than the default,
and how sure that is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paralab.analyse.blocks import Cell, Document, Finding, Line, Lines, Section, Table
from paralab.analyse.compare import comparison_of, read_manifest
from paralab.analyse.report import number, report
from paralab.analyse.verdict import is_same_training, times_as_fast
from paralab.errors import UsageError
from paralab.units import seconds

DEFAULT_MB = 25.0  # PyTorch's default bucket, for its place on the curve
HIGH = ("fp32", "fp64")


def choice_of(folder: Path) -> dict[str, Any]:
    """The fastest set-up that trains the same as the default, and the fastest one in low precision,
    where that is faster still."""
    manifest = read_manifest(folder)
    final = comparison_of(rungs_of(folder)[-1])
    rows = [row for row in final["rows"] if not row["error"] and is_same_training(row)]
    default = next(row for row in final["rows"] if row["name"] == manifest["default"])
    faster = [row for row in rows if row["speed_up"]["verdict"] == "faster"]
    same = [row for row in faster if row["precision"] == default["precision"]]
    chosen = max(same, key=_speed, default=default)
    low = max(
        (row for row in faster if row["precision"] not in (*HIGH, default["precision"])),
        key=_speed,
        default=None,
    )
    return {
        "kind": "tune",
        "default": _short(default),
        "chosen": _short(chosen),
        "best_is_default": chosen is default,
        "low_precision": _short(low) if low and _speed(low) > _speed(chosen) else None,
        "curve": curve(folder, manifest),
        "rungs": [rung.name for rung in rungs_of(folder)],
        "run_folder": str(folder),
    }


def rungs_of(folder: Path) -> list[Path]:
    """The rungs that were begun; the last one is the final one, unless the search was stopped."""
    found = sorted(folder.glob("rung*/manifest.json"))
    if not found:
        raise UsageError(
            f"The search in {folder} was stopped before anything was measured.",
            fix="paralab tune again",
        )
    return [path.parent for path in found]


def _speed(row: dict[str, Any]) -> float:
    return float(row["speed_up"]["value"])


def _short(row: dict[str, Any]) -> dict[str, Any]:
    names = (
        "name",
        "command",
        "step_seconds",
        "speed_up",
        "precision",
        "loss_difference",
        "parity",
        "peak_bytes",
    )
    return {name: row[name] for name in names} | {
        "exposed_seconds": row["metrics"]["exposed_communication_seconds"]
    }


def curve(folder: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Step time and exposed communication over the bucket size, all else as in the default.
    PyTorch's default stands at 25 MB."""
    first = comparison_of(rungs_of(folder)[0])
    rows = [row for row in first["rows"] if not row["error"]]
    default = rows[0]["request"]
    found = []
    for row in rows:
        others = {name: value for name, value in row["request"].items() if name != "bucket_mb"}
        if others == {name: value for name, value in default.items() if name != "bucket_mb"}:
            found.append(
                {
                    "bucket_mb": row["request"]["bucket_mb"],
                    "buckets": row["all_reduces_per_step"],
                    "step_seconds": row["step_seconds"]["median"],
                    "exposed_seconds": row["metrics"]["exposed_communication_seconds"],
                    "communication_seconds": row["metrics"]["communication_seconds"],
                }
            )
    return (
        sorted(found, key=lambda point: float(point["bucket_mb"] or DEFAULT_MB))
        if len(found) > 1
        else []
    )


def document(folder: Path) -> Document:
    manifest, choice = read_manifest(folder), choice_of(folder)
    final = rungs_of(folder)[-1]
    rest = report(comparison_of(final), final, _sections(choice))
    return replace(
        rest, title=f"Tune: {manifest['workload']['name']}", findings=findings(choice) + _kept(rest)
    )


def _kept(document: Document) -> tuple[Finding, ...]:
    return tuple(finding for finding in document.findings if finding.kind in ("same", "warning"))


def _sections(choice: dict[str, Any]) -> list[Section]:
    points = choice["curve"]
    if not points:
        return []
    columns = ("bucket", "all-reduces", "step time", "communication", "exposed")
    rows = tuple(
        (
            Cell(
                "25 MB, the first 1 MB (default)"
                if p["bucket_mb"] is None
                else f"{p['bucket_mb']:g} MB",
                p["bucket_mb"],
            ),
            Cell(f"{p['buckets']:g}", p["buckets"]),
            number(p["step_seconds"], seconds(p["step_seconds"])),
            number(p["communication_seconds"], seconds(p["communication_seconds"])),
            number(p["exposed_seconds"], seconds(p["exposed_seconds"])),
        )
        for p in points
    )
    lines = tuple(
        Line(label, tuple((float(p["bucket_mb"] or DEFAULT_MB), p[key]) for p in points))
        for label, key in (
            ("step time", "step_seconds"),
            ("exposed communication", "exposed_seconds"),
        )
    )
    note = "One round each; the final rounds decide. Too small: a cost per bucket. Too large: nothing left to hide it behind."
    picture = Lines(
        "Step time over the bucket size",
        lines,
        "bucket size in MB",
        "per optimizer step",
        "seconds",
        log_x=True,
    )
    return [Section("Bucket size", (picture, Table("", columns, rows, note)))]


def findings(choice: dict[str, Any]) -> tuple[Finding, ...]:
    default, chosen, low = choice["default"], choice["chosen"], choice["low_precision"]
    before, after = default["step_seconds"]["median"], chosen["step_seconds"]["median"]
    evidence = {"default_seconds": before, "chosen_seconds": after}
    if choice["best_is_default"]:
        text = f"The default stays: no change that trains the same was measurably faster than its {seconds(before)} per step."
        found = [Finding("fastest", text, evidence)]
    else:
        text = (
            f"`{chosen['name']}` takes {seconds(after)} per step, the default {seconds(before)}: "
            f"{times_as_fast(chosen['speed_up'])}. Use: `{chosen['command']}`"
        )
        found = [Finding("fastest", text, evidence | {"speed_up": chosen["speed_up"]})]
    if low:
        text = (
            f"In low precision `{low['name']}` is {times_as_fast(low['speed_up'])}; the losses of the trial moved by "
            f"{low['loss_difference'] or 0.0:.0e} of themselves. Use: `{low['command']}`"
        )
        found.append(
            Finding(
                "next",
                text,
                {"speed_up": low["speed_up"], "loss_difference": low["loss_difference"]},
            )
        )
    return tuple(found)
