"""The verdict on a comparison in plain words, each sentence with its numbers: the fastest, its
cost, its limit, what to try."""

from __future__ import annotations

import shlex
from typing import Any

from paralab.analyse.blocks import Finding
from paralab.analyse.confidence import speed_up
from paralab.analyse.efficiency_loss import losses_of, perfect_seconds
from paralab.analyse.metrics import RULE
from paralab.analyse.phrases import collectives
from paralab.analyse.verify import aside
from paralab.units import plural, seconds, size

Row = dict[str, Any]
BUSY = 0.85  # of its cores: less, and the machine is shared with somebody


def verdict(comparison: dict[str, Any]) -> tuple[Finding, ...]:
    rows = [row for row in comparison["rows"] if not row["error"]]
    baseline = next((row for row in rows if row["name"] == comparison["baseline"]), None)
    if not baseline:
        return tuple(_failures(comparison))
    if len(rows) == 1:
        return (
            _consists(baseline),
            *_next(baseline, rows),
            *_warnings(rows),
            *_failures(comparison),
        )
    sound = [row for row in rows if is_same_training(row) is not False and row["speed_up"]]
    surely = [row for row in sound if row["speed_up"]["verdict"] == "faster"]
    several = baseline["speed_up"]["low"] is not None
    best = max(
        surely if several else sound,
        key=lambda row: float(row["speed_up"]["value"]),
        default=baseline,
    )
    findings = [_fastest(best, baseline, sound)]
    parallel = (
        best
        if best["devices"] > 1
        else max(
            (row for row in sound if row["devices"] > 1),
            key=lambda row: float(row["speed_up"]["value"]),
            default=None,
        )
    )
    if parallel:
        sure = parallel["speed_up"]["verdict"] in ("faster", "slower", "baseline")
        findings += [
            _cost(parallel, baseline),
            *([_limit(parallel, baseline)] if sure else []),
            *_next(parallel, rows),
        ]
    return (*findings, *_same(rows), *_busy(baseline), *_warnings(rows), *_failures(comparison))


def is_same_training(row: Row) -> bool | None:
    """True: proved equal. False: another training. None: not checked."""
    parity = row.get("parity")
    return None if parity is None else bool(parity["equal"])


def times_as_fast(ratio: dict[str, Any]) -> str:
    """`1.93 times as fast (1.88–1.99)`, `0.69 times as fast (0.63–0.75)`."""
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f}–{ratio['high']:.2f})"
    return f"{ratio['value']:.2f} times as fast{interval}"


def _fastest(best: Row, baseline: Row, rows: list[Row]) -> Finding:
    times = "round_seconds_per_sample"
    equally = [
        row["name"]
        for row in rows
        if row is not best
        and speed_up(row[times], best[times]).verdict == "no measurable difference"
    ]
    evidence = {
        "step_seconds": best["step_seconds"],
        "speed_up": best["speed_up"],
        "equally_fast": equally,
    }
    step = seconds(best["step_seconds"]["median"])
    ratio = f"{times_as_fast(best['speed_up'])}, compared with `{baseline['name']}`"
    also = f" No measurable difference from it: {', '.join(equally)}." if equally else ""
    if best["speed_up"]["low"] is None:
        return Finding(
            "fastest",
            f"`{best['name']}` has the shortest step, {step}. Too few rounds to tell how sure that is.",
            evidence,
        )
    if best is baseline:
        text = f"Nothing is measurably faster than `{best['name']}`: {step} per step.{also}"
    else:
        text = f"`{best['name']}` is the fastest: {step} per step, {ratio}.{also}"
    return Finding("fastest", text, evidence)


def largest_memory(row: Row) -> int | None:
    """Of the fullest device."""
    return max((memory["bytes"] for memory in row["peak_bytes"]), default=None)


def _cost(row: Row, baseline: Row) -> Finding:
    mine, one = largest_memory(row), largest_memory(baseline)
    parts = [
        f"`{row['name']}` takes {plural(row['devices'], 'device')} in {plural(row['processes'], 'process')}"
    ]
    if mine and one:
        parts.append(
            f"{size(mine)} on its fullest device against {size(one)} for `{baseline['name']}`"
        )
    if row["bytes_per_step"]:
        parts.append(
            f"{collectives(row)} of together {size(row['bytes_per_step'])} per optimizer step and rank"
        )
    evidence = {
        "devices": row["devices"],
        "peak_bytes": mine,
        "baseline_peak_bytes": one,
        "bytes_per_step": row["bytes_per_step"],
        "all_reduces_per_step": row["all_reduces_per_step"],
    }
    return Finding("cost", "; ".join(parts) + ".", evidence)


def shares(row: Row) -> dict[str, float]:
    """What a step consists of, as shares of it, the largest first."""
    metrics, step = row["metrics"], row["step_seconds"]["median"]
    names = {
        "compute": "compute_seconds",
        "exposed communication": "exposed_communication_seconds",
        "waiting for a slower rank": "exposed_waiting_seconds",
        "optimizer": "optimizer_seconds",
        "other": "other_seconds",
    }
    found = {name: (metrics[key] or 0.0) / step for name, key in names.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _consists(row: Row) -> Finding:
    """One run alone: what its step is made of."""
    parts = [f"{share:.0%} {name}" for name, share in shares(row).items() if share >= 0.01]
    step = seconds(row["step_seconds"]["median"])
    return Finding(
        "limit",
        f"A step of `{row['name']}` takes {step}: {', '.join(parts)}.",
        {"shares": shares(row)},
    )


def _limit(row: Row, baseline: Row) -> Finding:
    """Where the time went that a perfect split over the devices would have saved."""
    step, name = row["step_seconds"]["median"], row["name"]
    perfect, causes = perfect_seconds(row, baseline), losses_of(row, baseline)
    largest = max(causes, key=lambda cause: causes[cause])
    evidence = {
        "perfect_seconds": perfect,
        "step_seconds": step,
        "lost_seconds": causes,
        "shares": shares(row),
    }
    sharing = next(
        (remark for remark in row["remarks"] if "share cores" in remark or "shared:" in remark),
        None,
    )
    idle = row["metrics"]["bubble"]
    if step - perfect <= 0.05 * step and not (idle and idle["measured"] > idle["ideal"] + 0.1):
        text = f"`{name}` loses next to nothing: {seconds(step)} against {seconds(perfect)} for a perfect split."
        return Finding("limit", text, evidence)
    split = f"A perfect split over {plural(row['devices'], 'device')} would take {seconds(perfect)}"
    if perfect >= step:  # the baseline is no better spread itself
        text = f"What costs `{name}` most is {largest}: {seconds(causes[largest])} of {seconds(step)} per step."
    else:
        lost = (
            f"The largest part of the difference is {largest}: {seconds(causes[largest])} per step."
        )
        text = f"{split}; `{name}` takes {seconds(step)}. {lost}"
    if sharing:
        text += f" ({sharing[0].upper()}{sharing[1:]}.)"
    return Finding("limit", text, evidence)


def tune_command(row: Row) -> str:
    """The search for the same training: what decides it is kept."""
    asked, words = row["request"], ["paralab", "tune", row["strategy"]]
    kept = ("workload", "replicas", "stages", "batch_size", "precision", "device", "seed")
    for name in (
        kept if row["strategy"] == "hybrid" else [name for name in kept if name != "stages"]
    ):
        if asked.get(name) not in (None, 0, "fp32", "auto"):
            words += [f"--{name.replace('_', '-')}", str(asked[name])]
    return shlex.join(words)


def _next(row: Row, rows: list[Row]) -> list[Finding]:
    """What to change, as far as the numbers point to it."""
    metrics, found = row["metrics"], []
    share, exposed = metrics["communication_share"] or 0.0, metrics["exposed_share"] or 0.0
    if row["strategy"] in ("ddp", "hybrid") and exposed >= RULE:
        buckets = row["all_reduces_per_step"] or 0
        overlap = metrics["overlap"] or 0.0
        command = tune_command(row)
        text = (
            f"Communication takes {share:.0%} of the step (the rule of thumb is below {RULE:.0%}), and {exposed:.0%} is exposed. "
            f"{buckets:g} bucket(s) hide {overlap:.0%} of it. `{command}` searches for the bucket size, accumulation and options "
            "that expose less."
        )
        found.append(
            Finding(
                "next",
                text,
                {"communication_share": share, "exposed_share": exposed, "overlap": overlap},
            )
        )
    if row["strategy"] == "fsdp" and exposed >= RULE:
        text = (
            f"Shards on their way take {share:.0%} of the step, and {exposed:.0%} is exposed: every pass gathers every parameter "
            "twice. Fewer passes per step (`--accumulate`) gather less; `ddp` gathers nothing, if the whole model fits on a device."
        )
        found.append(
            Finding("next", text, {"communication_share": share, "exposed_share": exposed})
        )
    measured = next(
        (other for other in rows if other["strategy"] == "ddp" and other["accumulate"] == 1), None
    )
    if row["strategy"] == "dp" and measured is None:
        text = "`ddp` instead of `dp`: it copies no model in every step, and no device collects for the others."
        found.append(
            Finding("next", text, {"communication_share": share, "balance": metrics["balance"]})
        )
    bubble = metrics["bubble"]
    if bubble and bubble["measured"] > 0.15:
        text = (
            f"The stages idle {bubble['measured']:.0%} of the time ({bubble['ideal']:.0%} is ideal for these micro-batches): "
            "more `--micro-batches`, or stages of more equal length (`paralab plan` shows their times)."
        )
        found.append(Finding("next", text, bubble))
    late = metrics["straggler"]
    if late:
        text = f"Rank {late['rank']} is slower than the others, which wait {late['share_of_step']:.0%} of every step for it."
        found.append(Finding("next", text, late))
    wait, step = metrics["data_wait_seconds"] or 0.0, row["step_seconds"]["median"]
    if wait > 0.05 * step:
        text = f"Between steps the device waits {seconds(wait)} for data: more loader workers, or a cheaper transform."
        found.append(Finding("next", text, {"data_wait_seconds": wait}))
    return found


def _same(rows: list[Row]) -> list[Finding]:
    checked = [row for row in rows if row.get("parity") is not None]
    if not checked:
        return [Finding("same", "Whether these trainings are the same was not checked.", {})]
    equal = [row for row in checked if row["parity"]["equal"]]
    known = [row for row in equal if aside(row["parity"])]
    wrong = [row for row in checked if not row["parity"]["equal"]]
    tolerance = checked[0]["parity"]["tolerance"]
    largest = max((row["parity"]["max_difference"] or 0.0 for row in equal), default=0.0)
    text = f"{len(equal)} of {len(checked)} set-ups train like one device (fp64, largest difference of a parameter {largest:.1e})."
    if known:
        reasons = "; ".join(known[0]["parity"]["excused"]["reasons"])
        text += f" For {len(known)} of them the proof held fixed what differs for a known reason: {reasons}."
    evidence = {
        "equal": len(equal),
        "of": len(checked),
        "tolerance": tolerance,
        "max_difference": largest,
    }
    found = [Finding("same", text, evidence)]
    for row in wrong:
        text = f"`{row['name']}` trains something else: {row['parity']['cause']}."
        found.append(
            Finding(
                "warning",
                text,
                {"max_difference": row["parity"]["max_difference"], "tolerance": tolerance},
            )
        )
    return found


def _busy(baseline: Row) -> list[Finding]:
    """A set-up on one device has nothing to wait for: where it did not get its cores, something
    else had them."""
    cores = baseline["metrics"]["load"]["cores_per_rank"][0]
    asked = baseline["threads_per_device"]
    if (
        baseline["strategy"] != "single"
        or cores is None
        or cores > BUSY * asked
        or baseline["peak_bytes"][0]["how"] != "counted"
    ):
        return []
    text = (
        f"This machine was busy with something else: `{baseline['name']}` got {cores:.2f} of its {plural(asked, 'core')}. "
        "Repeat it when the machine is idle."
    )
    return [Finding("warning", text, {"cores_used": cores, "cores_asked": asked})]


def _warnings(rows: list[Row]) -> list[Finding]:
    """What a run said of itself: losses that are not finite, steps that were skipped or not
    finished."""
    return [
        Finding("warning", f"`{row['name']}`: {warning}.", {})
        for row in rows
        for warning in row["warnings"]
    ]


def _failures(comparison: dict[str, Any]) -> list[Finding]:
    failed = [
        Finding("warning", f"`{row['name']}` failed: {row['error']}", {"command": row["command"]})
        for row in comparison["rows"]
        if row["error"]
    ]
    left = [
        Finding("warning", f"`{entry['name']}` was left out: {entry['reason']}", {})
        for entry in comparison["left_out"]
    ]
    return failed + left
