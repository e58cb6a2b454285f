"""`paralab tune`: search for the bucket size, accumulation, micro-batches, precision, and DDP
options with the fastest optimizer step.

The search is successive halving over rounds of measurements. paralab does not use a search library,
because there are few options with few values each, and a measurement takes seconds. It is more
important to measure each value next to the default, at about the same time.

    rung 1   the default and every single change, one round       -> the curve by bucket size
    rung 2   the promising changes combined, two rounds           -> the better half of them
    final    the best and the default, verified, five rounds      -> how much faster, how certain

Low precision is measured the same way but listed separately. It is fast because it rounds, which
changes the last digits of the results.
"""

import time
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields

from paralab.analyse.compare import Comparison, Row
from paralab.analyse.tune import TuneResult, choice_of
from paralab.errors import RunFailed, UsageError
from paralab.experiment.compare import compare
from paralab.experiment.configurations import Configuration
from paralab.experiment.planning import inspect_once, slug
from paralab.launch.job import Print
from paralab.machine.host import Machine
from paralab.plan.check import check
from paralab.plan.plan import label
from paralab.plan.request import APPLIES, Options, Request
from paralab.plan.schedules import misfit
from paralab.record.folder import RunFolder
from paralab.workload.reference import check_reference
from paralab.workload.summary import Summary

TUNED = ("bucket_mb", "accumulate", "micro_batches", "bucket_view", "static_graph", "precision")
FINAL_ROUNDS = 5
TOLERATED = 1.02  # a change that looks at most this much slower on its own may help in combination
FULL = 0.95  # skip configurations that need more than this share of a device's memory


def tune(
    base: Request,
    *,
    trials: int | None = None,
    budget_seconds: float | None = None,
    out: Path | None = None,
    say: Print = lambda line: None,
) -> TuneResult:
    """Run the search, and compute the choice from the run folders of the rungs."""
    check(base)
    if base.strategy not in ("ddp", "pipeline", "hybrid"):
        problem = f"{base.strategy} has no buckets or micro-batches to tune."
        raise UsageError(problem, fix="tune ddp, pipeline, or hybrid")
    started = time.perf_counter()
    base = replace(base, workload=check_reference(base.workload))
    machine, summary = inspect_once(base, [base.strategy])
    folder = RunFolder.create(out, f"tune_{base.strategy}_{slug(summary.name)}")
    folder.write_manifest(
        kind="tune", machine=asdict(machine), workload=asdict(summary), default=label(base)
    )
    spent = 0

    def left() -> bool:
        """Return whether the budget allows another rung before the final one."""
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
    rounds = FINAL_ROUNDS
    if trials is not None:
        rounds = max(2, min(FINAL_ROUNDS, (trials - spent) // (len(finalists) + 1)))
    say(f"final: the default and {len(finalists)} more, {rounds} rounds, verified")
    rungs.append(_rung(folder, len(rungs) + 1, base, finalists, rounds, say))
    seconds = round(time.perf_counter() - started, 3)
    result = replace_fields(choice_of(folder.path), seconds=seconds)
    folder.write("result.json", result.to_dict())
    return result


def single_changes(base: Request, summary: Summary, on_gpu: bool) -> list[Request]:
    """Return the default with one option changed, for each option that was not given."""
    batch = base.batch_size or summary.batch_size
    mebi = summary.parameter_bytes / 2**20
    stages, per_replica = base.stages or 2, batch // (base.replicas or 1)
    values: dict[str, list[Any]] = {
        "bucket_mb": [round(mebi / n, 2) for n in (1, 2, 4, 8, 16, 32) if mebi / n >= 0.05],
        "accumulate": [n for n in (2, 4) if batch // (base.replicas or 2) >= n],
        "micro_batches": [
            n
            for n in (2, 4, 8, 16)
            if per_replica >= n and not (base.schedule and misfit(base.schedule, stages, n))
        ],
        # With a schedule, gradients are summed without DDP.
        "bucket_view": [] if base.schedule else [True],
        "static_graph": [True] if (base.accumulate or 1) == 1 else [],
        "precision": ["tf32", "bf16", "fp16"] if on_gpu else ["bf16"],
    }
    return [
        replace(base, **{name: value})
        for name in TUNED
        if getattr(base, name) is None and base.strategy in APPLIES.get(name, (base.strategy,))
        for value in values[name]
    ]


def combinations(base: Request, rung: Comparison) -> list[Request]:
    """Combine the best values that do not look slower: all of them, and all but one."""
    times = _relative_times(rung)
    best: Options = {}
    for name in TUNED:
        values = {getattr(request, name): time_ for request, time_ in times}
        values.pop(None, None)
        if name == "precision" or getattr(base, name) is not None or not values:
            continue
        value = min(values, key=lambda value: values[value])
        if values[value] <= TOLERATED:
            best[name] = value
    if best.get("accumulate"):
        best.pop("static_graph", None)

    fewer = [{name: best[name] for name in best if name != left_out} for left_out in best]
    changed = [each for each in [best, *fewer] if len(each) > 1]
    return list(dict.fromkeys(replace(base, **each) for each in changed))


def _finalists(base: Request, rungs: list[Comparison]) -> list[Request]:
    """Return the two best configurations, and the best one in the fastest low precision."""
    times = sorted(chain(*map(_relative_times, rungs)), key=lambda each: each[1])
    chosen, low = [], []
    for request, time_ in times:
        if (request.precision or "fp32") == (base.precision or "fp32"):
            chosen.append(replace(request, threads_per_device=None))
        elif request.precision and time_ < 1:
            low.append(request.precision)
    chosen = chosen[:2]
    if low:
        chosen.append(replace(chosen[0] if chosen else base, precision=low[0]))
    return list(dict.fromkeys(chosen))


def _rung(
    folder: RunFolder,
    number: int,
    base: Request,
    changed: list[Request],
    rounds: int,
    say: Print | None = None,
) -> Comparison:
    """Measure the default next to the changes. The final rung (with `say`) verifies them."""
    others = [Configuration(request, optional=True) for request in changed if request != base]
    configurations = [Configuration(base), *others]
    path = folder.path / f"rung{number}"
    tell = say or (lambda line: None)
    rung = compare(configurations, rounds=rounds, verify=say is not None, out=path, say=tell)
    for failed in rung.failed:
        if failed.name == configurations[0].label:
            raise RunFailed(f"The default fails: {failed.error}", fix=f"read the logs in {path}")
    return rung


def _relative_times(rung: Comparison) -> list[tuple[Request, float]]:
    """Return each change that fits in memory, with its step time relative to the first row."""
    default, *changed = rung.rows
    return [
        (row.request, row.step_seconds.median / default.step_seconds.median)
        for row in changed
        if _fits(row, rung.machine)
    ]


def _fits(row: Row, machine: Machine) -> bool:
    """Return whether a configuration fits in memory. On a GPU, compare the allocator's peak with
    device memory. On CPUs, compare the tensors on all devices with the machine's memory."""
    peaks = [memory.bytes for memory in row.peak_bytes]
    if machine.gpus and row.peak_bytes and row.peak_bytes[0].how == "allocator":
        return max(peaks) <= FULL * min(gpu.memory_bytes for gpu in machine.gpus)
    return machine.memory_bytes is None or sum(peaks) <= FULL * machine.memory_bytes
