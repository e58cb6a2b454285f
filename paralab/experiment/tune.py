"""`paralab tune`: the bucket size, accumulation, micro-batches, precision and DDP options with the
fastest optimizer step.

Successive halving over measurements in turns. There are a handful of factors with few values each,
and a measurement takes seconds: a library for large searches would bring little. What matters is
that every value is measured beside the default, in the same minutes.

    rung 1   the default and every single change, one round            -> the curve over the bucket size
    rung 2   the promising changes combined, two rounds                -> the better half
    final    the best ones and the default, five rounds, proved equal  -> how much faster, and how sure

Low precision is measured in the same way, but told apart: it is fast because it rounds, which
changes the training's last digits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from paralab.analyse.tune import choice_of
from paralab.errors import RunFailed, UsageError
from paralab.experiment.compare import compare
from paralab.experiment.planning import look_once, slug
from paralab.experiment.rounds import Case
from paralab.plan.check import check
from paralab.plan.label import label
from paralab.plan.request import APPLIES, Request
from paralab.plan.schedules import misfit
from paralab.record.folder import RunFolder
from paralab.workload.reference import check_reference
from paralab.workload.summary import Summary

TUNED = ("bucket_mb", "accumulate", "micro_batches", "bucket_view", "static_graph", "precision")
FINAL_ROUNDS = 5
TOLERATED = 1.02  # a change that looks at most this much slower alone may still help in combination
FULL = 0.95  # of a device's memory: a set-up that needs more is out
MEBI = 2**20


def tune(
    base: Request,
    *,
    trials: int | None = None,
    budget_seconds: float | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Search; return the choice, which is computed from the folders that the rungs leave."""
    check(base)
    if base.strategy not in ("ddp", "pipeline", "hybrid"):
        raise UsageError(
            f"{base.strategy} has nothing to tune: no buckets, no micro-batches.",
            fix="tune ddp, pipeline or hybrid",
        )
    started = time.perf_counter()
    base = replace(base, workload=check_reference(base.workload))
    machine, summary = look_once(base.workload, base.device, True, base.batch_size, 1)
    folder = RunFolder.create(out, f"tune_{base.strategy}_{slug(summary.name)}")
    folder.write_manifest(
        kind="tune", machine=asdict(machine), workload=asdict(summary), default=label(base)
    )
    spent = 0

    def left() -> bool:
        """Is there budget for another rung before the final one?"""
        enough_time = budget_seconds is None or time.perf_counter() - started < budget_seconds / 2
        return enough_time and (trials is None or spent < trials / 2)

    singles = single_changes(base, summary, on_gpu=bool(machine.gpus) and base.device != "cpu")
    if trials is not None:
        singles = singles[: max(1, trials // 2)]
    say(f"rung 1: the default and {len(singles)} single changes, one round")
    rungs = [_rung(folder, 1, base, singles, 1)]
    spent += len(singles) + 1
    combined = combinations(base, rungs[0])
    if combined and left():
        say(f"rung 2: {len(combined)} combinations, two rounds")
        rungs.append(_rung(folder, 2, base, combined, 2))
        spent += 2 * (len(combined) + 1)
    finalists = _finalists(base, rungs)
    rounds = (
        FINAL_ROUNDS
        if trials is None
        else max(2, min(FINAL_ROUNDS, (trials - spent) // (len(finalists) + 1)))
    )
    say(f"final: the default and {len(finalists)} more, {rounds} rounds, proved equal")
    rungs.append(_rung(folder, len(rungs) + 1, base, finalists, rounds, say))
    result = choice_of(folder.path) | {"seconds": round(time.perf_counter() - started, 3)}
    folder.write_result(result)
    return result


def single_changes(base: Request, summary: Summary, on_gpu: bool) -> list[Request]:
    """The default with one thing changed, for everything that was not given."""
    changes: list[Request] = []

    def vary(name: str, values: list[Any]) -> None:
        if getattr(base, name) is None and base.strategy in APPLIES.get(name, (base.strategy,)):
            changes.extend(replace(base, **{name: value}) for value in values)

    whole = summary.parameter_bytes / MEBI
    vary(
        "bucket_mb",
        [round(whole / parts, 2) for parts in (1, 2, 4, 8, 16, 32) if whole / parts >= 0.05],
    )
    batch = base.batch_size or summary.batch_size
    vary("accumulate", [parts for parts in (2, 4) if batch // (base.replicas or 2) >= parts])
    enough = [parts for parts in (2, 4, 8, 16) if batch // (base.replicas or 1) >= parts]
    vary(
        "micro_batches",
        [n for n in enough if not base.schedule or not misfit(base.schedule, base.stages or 2, n)],
    )
    if not base.schedule:  # which adds the gradients up without DDP
        vary("bucket_view", [True])
    if (base.accumulate or 1) == 1:
        vary("static_graph", [True])
    vary("precision", ["tf32", "bf16", "fp16"] if on_gpu else ["bf16"])
    return changes


def combinations(base: Request, rung: dict[str, Any]) -> list[Request]:
    """The best value of every factor that does not look slower, taken together, and each left out
    once."""
    default, tried = _seconds(base, rung), _outcomes(rung)
    best: dict[str, Any] = {}
    for name in TUNED:
        asked = [(row["request"][name], row["seconds"]) for row in tried]
        options = {value: seconds for value, seconds in asked if value is not None}
        if name != "precision" and getattr(base, name) is None and options:
            value = min(options, key=lambda option: float(options[option]))
            if options[value] <= TOLERATED * default:
                best[name] = value
    if best.get("accumulate"):
        best.pop("static_graph", None)
    found = [best] + [
        {name: value for name, value in best.items() if name != left_out} for left_out in best
    ]
    return list(dict.fromkeys(replace(base, **changed) for changed in found if len(changed) > 1))


def _finalists(base: Request, rungs: list[dict[str, Any]]) -> list[Request]:
    """The two best of all rungs, and the best of them in the fastest low precision."""
    rows = [row for rung in rungs for row in _outcomes(rung) if row["fits"]]
    same = [
        row
        for row in rows
        if (row["request"]["precision"] or "fp32") == (base.precision or "fp32")
        and not _is(row, base)
    ]
    ordered = sorted(same, key=lambda row: float(row["relative"]))
    chosen = [_request(row) for row in ordered[:2]]
    low = [
        row
        for row in rows
        if row["request"]["precision"] not in (None, base.precision) and row["relative"] < 1
    ]
    if low:
        fastest = min(low, key=lambda row: float(row["relative"]))
        chosen.append(
            replace(chosen[0] if chosen else base, precision=fastest["request"]["precision"])
        )
    return list(dict.fromkeys(chosen))


def _rung(
    folder: RunFolder,
    number: int,
    base: Request,
    changed: list[Request],
    rounds: int,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure the default and the changed ones side by side; the final rung, which is told, is
    proved as well."""
    cases = [Case(base), *(Case(request, optional=True) for request in changed if request != base)]
    path = folder.path / f"rung{number}"
    rung = compare(
        cases, rounds=rounds, prove=say is not None, out=path, say=say or (lambda line: None)
    )
    if rung["rows"][0]["error"]:
        raise RunFailed(
            f"The default itself fails: {rung['rows'][0]['error']}", fix=f"read the logs in {path}"
        )
    return rung


def _outcomes(rung: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that came to an end: what was asked, its step, relative to the rung's default, and
    whether it fits into memory."""
    rows = [row for row in rung["rows"] if not row["error"]]
    default = rows[0]["step_seconds"]["median"]
    return [
        {
            "request": row["request"],
            "seconds": row["step_seconds"]["median"],
            "relative": row["step_seconds"]["median"] / default,
            "fits": _fits(row, rung["machine"]),
        }
        for row in rows
    ]


def _fits(row: dict[str, Any], machine: dict[str, Any]) -> bool:
    """On a GPU the allocator's peak against the device's memory; on CPUs the tensors of all devices
    against the host's."""
    peaks = [memory["bytes"] for memory in row["peak_bytes"]]
    if machine["gpus"] and row["peak_bytes"] and row["peak_bytes"][0]["how"] == "allocator":
        return bool(max(peaks) <= FULL * min(gpu["memory_bytes"] for gpu in machine["gpus"]))
    return machine["memory_bytes"] is None or bool(sum(peaks) <= FULL * machine["memory_bytes"])


def _seconds(base: Request, rung: dict[str, Any]) -> float:
    return float(next(row["seconds"] for row in _outcomes(rung) if _is(row, base)))


def _is(row: dict[str, Any], request: Request) -> bool:
    return all(row["request"][name] == getattr(request, name) for name in TUNED)


def _request(row: dict[str, Any]) -> Request:
    known = {field.name for field in fields(Request)}
    request = Request(**{name: value for name, value in row["request"].items() if name in known})
    return replace(request, threads_per_device=None)
