"""Write a comparison's verdict in words: the fastest configuration, its cost, and its limit."""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeVar

from paralab.analyse.blocks import Finding
from paralab.analyse.compare import Comparison, Row
from paralab.analyse.confidence import speed_up
from paralab.analyse.metrics import RULE
from paralab.analyse.phrases import (
    capital,
    collectives_per_step,
    compile_cost,
    factor,
    listed,
    times_as_fast,
)
from paralab.analyse.scaling import losses_of, perfect_seconds
from paralab.analyse.time_tables import KINDS
from paralab.analyse.verify import alike, apart_from, describe_simulated
from paralab.plan.lossy import is_lossy
from paralab.plan.remarks import find_sharing
from paralab.units import difference, plural, seconds, size, whole_percents

SHOWN = 6  # names in a sentence
N = TypeVar("N", int, float)
WAIT = 0.05  # say so if the wait for data is longer than this share of the step
BUSY = 0.85  # if a run gets less than this share of its cores, another program uses the machine


def verdict(comparison: Comparison) -> tuple[Finding, ...]:
    rows = comparison.rows
    baseline = next((row for row in rows if row.name == comparison.baseline), None)
    if not baseline:
        return tuple(_warnings(comparison))
    if len(rows) == 1:
        advice = (*_next(baseline, rows), *_waits([baseline], baseline), *_compiling(rows))
        # Report warnings and failures before times.
        return (*_warnings(comparison), _parts(baseline), *advice)

    # A configuration that is faster but trains differently does not win.
    proved = [row for row in rows if is_same_training(row) is not False and row.speed_up]
    sound = [row for row in rows if row is baseline or row in proved]
    lossy = [] if is_lossy(baseline.request) else [row for row in rows if is_lossy(row.request)]
    sound = [row for row in sound if row not in lossy]
    faster = [row for row in sound if row.ratio.verdict == "faster"]
    several = baseline.ratio.low is not None
    best = max(faster if several else sound, key=lambda row: row.ratio.value, default=baseline)
    findings = [_fastest(best, baseline, sound)]

    candidates = [best] if best.devices > 1 else [row for row in sound if row.devices > 1]
    parallel = max(candidates, key=lambda row: row.ratio.value, default=None)
    if parallel:
        findings.append(_cost(parallel, baseline))
        if parallel is baseline:
            findings.append(_parts(parallel))
        elif parallel.ratio.verdict in ("faster", "slower"):
            findings.append(_limit(parallel, baseline))
        findings += _next(parallel, rows)
    findings += _waits([row for row in rows if row in (best, parallel)], baseline)
    findings += [_lossy(row, baseline) for row in lossy if row.speed_up]
    return (
        *findings,
        *_compiling(rows),
        *_same(rows),
        *_busy(baseline, comparison.machine.cores),
        *_warnings(comparison),
    )


def is_same_training(row: Row) -> bool | None:
    """Return True if equal, False if it differs, or None if it is not checked or lossy."""
    if row.verify is None or row.verify.as_simulated:
        return None
    return row.verify.equal


def _fastest(best: Row, baseline: Row, rows: list[Row]) -> Finding:
    others: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row is not best:
            ratio = speed_up(row.round_seconds_per_sample, best.round_seconds_per_sample)
            others[ratio.verdict].append(row.name)
    equally, unsure = others["no difference"], others["too noisy"]

    step = seconds(best.step_seconds.median)
    if best.ratio.low is None:
        shortest = min(row.step_seconds.median for row in rows)
        text = f"`{best.name}` has the shortest step, {step}."
        if best.step_seconds.median > shortest:
            text = f"`{best.name}` trains the most samples per second, {step} per step."
        text += " There were too few rounds for a confidence interval."
    elif best is baseline:
        text = f"Nothing is measurably faster than `{best.name}`: {step} per step."
    else:
        faster = times_as_fast(best.ratio, baseline.name)
        text = f"`{best.name}` is fastest: {step} per step, {faster}."
    text += f" Equally fast: {_list(equally)}." if equally else ""
    text += f" Too noisy to tell: {_list(unsure)}." if unsure else ""
    measured = {"step_seconds": best.step_seconds.to_dict(), "speed_up": best.ratio.to_dict()}
    names = {"equally_fast": equally, "too_noisy_to_tell": unsure}
    return Finding("fastest", text, measured | names)


def _list(names: list[str]) -> str:
    """List the first names. The evidence has all of them."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN + 1 else ""
    shown = names[:SHOWN] if more else names
    return ", ".join(f"`{name}`" for name in shown) + more


def largest_memory(row: Row) -> int | None:
    """Return the peak bytes on the device that uses the most memory."""
    return max((memory.bytes for memory in row.peak_bytes), default=None)


def _cost(row: Row, baseline: Row) -> Finding:
    mine, one = largest_memory(row), largest_memory(baseline)
    devices, processes = plural(row.devices, "device"), plural(row.processes, "process")
    text = f"`{row.name}` uses {devices} in {processes}"
    if mine and one:
        text += f"; up to {size(mine)} on one device"
        text += f" (`{baseline.name}`: {size(one)})" if row is not baseline else ""
    if row.bytes_per_step:
        moved = f"{collectives_per_step(row)}, {size(row.bytes_per_step)} in total"
        text += f"; {moved}, per rank and optimizer step"
    evidence = {"devices": row.devices, "peak_bytes": mine, "baseline_peak_bytes": one}
    evidence |= {name: row[name] for name in ("bytes_per_step", "all_reduces_per_step")}
    return Finding("cost", f"{text}.", evidence)


def _shares(row: Row) -> dict[str, float]:
    """Return each part's share of the step, largest first; empty if no step has details."""
    parts = row.metrics.shares
    shares = _combine(parts.to_dict()) if parts else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _combine(parts: Mapping[str, N]) -> dict[str, N]:
    """Name the parts of a step. Forward and backward are one part."""
    return {
        "compute": parts["forward"] + parts["backward"],
        "exposed communication": parts["exposed_communication"],
        "waiting for a slower rank": parts["waiting"],
        "optimizer": parts["optimizer"],
        "other": parts["other"],
        "skew (ranks start or end at different times)": parts["skew"],
    }


def _parts(row: Row) -> Finding:
    """List the parts of a step, in the same whole percents as the chart of shares."""
    shares, text = _shares(row), f"`{row.name}` takes {seconds(row.step_seconds.median)} per step"
    if row.metrics.shares:
        exact = {field: row.metrics.shares[field] for field in KINDS}
        whole = dict(zip(exact, whole_percents(list(exact.values())), strict=True))
        percents = _combine(whole)
        text += ". On average: "
        text += ", ".join(f"{percents[name]}% {name}" for name in shares if percents[name])
    return Finding("limit", f"{text}.", {"shares": shares})


def _limit(row: Row, baseline: Row) -> Finding:
    """Explain the gap to a perfect split over the devices."""
    step, perfect, name = row.step_seconds.median, perfect_seconds(row, baseline), row.name
    causes, idle = losses_of(row, baseline), row.metrics.bubble
    evidence = {"perfect_seconds": perfect, "step_seconds": step, "lost_seconds": causes}
    evidence["shares"] = _shares(row)
    if step - perfect <= 0.05 * step and not (idle and idle.measured > idle.ideal + 0.1):
        split = f"a perfect split of `{baseline.name}` would take {seconds(perfect)}"
        lost = "It loses almost nothing" if step > 0.95 * perfect else "It is faster than that"
        text = f"`{name}` takes {seconds(step)} per step; {split}. {lost}."
        return Finding("limit", text, evidence)

    largest = max(causes, key=lambda cause: causes[cause])
    lost, cause = seconds(causes[largest]), "unexplained" if largest == "other" else largest
    if perfect >= step:  # no slower than a perfect split of the baseline's work
        text = f"The largest cost of `{name}` is {cause}: {lost} of {seconds(step)} per step."
    else:
        most = "Most" if causes[largest] > (step - perfect) / 2 else "The largest part"
        text = (
            f"A perfect split over {plural(row.devices, 'device')} would take {seconds(perfect)}; "
            f"`{name}` takes {seconds(step)}. {most} of the gap is {cause}: {lost} per step."
        )
    if shared := find_sharing(row.remarks):
        text += f" ({capital(shared)}.)"
    return Finding("limit", text, evidence)


def tune_command(row: Row, any_strategy: bool = False) -> str:
    """Return the tune command for the same training, with the options that affect training. It
    searches this strategy's options, or every way to use the devices."""
    axes: tuple[str, ...] = ("replicas", "stages", "shards")
    words = ["paralab", "tune", row.strategy]
    if any_strategy:
        axes, words = (), ["paralab", "tune", "--devices", str(row.devices)]
    for name in ("workload", *axes, "batch_size", "precision", "device", "seed"):
        value = getattr(row.request, name)
        applies = name not in axes[1:] or row.strategy == "hybrid"
        if applies and value not in (None, 0, "fp32", "auto"):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _compiling(rows: list[Row]) -> Iterator[Finding]:
    """Say what compiling costs, and when it pays off."""
    for row in rows:
        if made := row.compilation:
            text = f"`{row.name}`: {compile_cost(made)}."
            yield Finding("compile", text, made.to_dict())


def _next(row: Row, rows: list[Row]) -> Iterator[Finding]:
    """Suggest changes that the numbers support."""
    metrics = row.metrics
    share, exposed = metrics.communication_share or 0.0, metrics.exposed_share or 0.0
    costs = {"communication_share": share, "exposed_share": exposed}
    if any(rank.shard for rank in row.ranks) and exposed >= RULE:
        text = (
            f"Communication takes {share:.0%} of the step; its exposed part takes {exposed:.0%}. "
            "Within each pass, the shards exchange activations and their gradients, and wait for "
            f"them. `{tune_command(row, any_strategy=True)}` searches for a faster way to use "
            f"{plural(row.devices, 'device')}."
        )
        yield Finding("next", text, costs)
    elif row.strategy in ("ddp", "hybrid") and exposed >= RULE:
        overlap, number = metrics.overlap or 0.0, row.all_reduces_per_step
        buckets = f"{number:g} bucket" + (" hides" if number == 1 else "s hide")
        text = (
            f"Communication takes {share:.0%} of the step (the rule of thumb is below {RULE:.0%}); "
            f"its exposed part takes {exposed:.0%}. {buckets} {overlap:.0%} of the "
            f"communication. `{tune_command(row)}` searches for a better bucket size, accumulation, and options."
        )
        yield Finding("next", text, costs | {"overlap": overlap})
    if row.strategy == "fsdp" and row.all_gathers_per_step and exposed >= RULE:
        times = "once" if row.request.zero == 2 else "twice"
        text = (
            f"Shard communication takes {share:.0%} of the step; its exposed part takes "
            f"{exposed:.0%}. Each pass gathers each parameter {times}, so fewer passes per step "
            "(`--accumulate`) gather less. If the model fits on one device, use `ddp`, which does "
            "not gather parameters."
        )
        yield Finding("next", text, costs)
    if row.strategy == "dp" and not any(o.strategy == "ddp" and o.accumulate == 1 for o in rows):
        better = "it does not copy the model in each step, and no device collects all gradients"
        evidence = {"communication_share": share, "balance": metrics.balance}
        yield Finding("next", f"Try `ddp` instead of `dp`: {better}.", evidence)
    if metrics.bubble and metrics.bubble.measured > 0.15:
        text = (
            f"The stages are idle {metrics.bubble.measured:.0%} of the time "
            f"({metrics.bubble.ideal:.0%} is ideal for these micro-batches). "
        )
        more = "more `--micro-batches`" if row.strategy != "mp" else "`pipeline`'s micro-batches"
        text += f"Use {more}"
        if metrics.bubble.measured > metrics.bubble.ideal + 0.05:
            text += ", or more balanced stages (`paralab plan` shows their times)"
        text += "."
        yield Finding("next", text, metrics.bubble.to_dict())
    if late := metrics.straggler:
        wait = f"they wait for it during {late.share_of_step:.0%} of each step"
        text = f"Rank {late.rank} is slower than the others: {wait}."
        yield Finding("next", text, late.to_dict())


def _waits(rows: list[Row], baseline: Row) -> Iterator[Finding]:
    """Say how long these rows and the baseline wait for data, and what they gain if that counts."""
    others = [row for row in rows if row is not baseline]
    waits = {row.name: row.metrics.data_seconds_between_steps for row in [baseline, *others]}
    if not any(waits[r.name] > WAIT * r.step_seconds.median for r in [baseline, *others]):
        return
    each = listed([f"`{name}` waits {seconds(wait)}" for name, wait in waits.items()])
    text = f"Between steps, {each} for data. Step times and speed-ups do not include this."
    ratios = {row.name: _with_data(baseline) / _with_data(row) for row in others}
    for row_name, ratio in ratios.items():
        text += f" With it, `{row_name}` is {factor(ratio)} times as fast as `{baseline.name}`."
    text += " For a Dataset, more loader workers or cheaper transforms shorten the wait."
    evidence = {"data_wait_seconds": waits, "speed_up_with_data": ratios}
    yield Finding("warning" if others else "next", text, evidence)


def _with_data(row: Row) -> float:
    """Return the seconds per sample, including the wait for data."""
    step = row.step_seconds.median + row.metrics.data_seconds_between_steps
    return step / (row.samples_per_step or row.batch.size)


def _lossy(row: Row, baseline: Row) -> Finding:
    """Say what a lossy configuration gains, and how differently it trains."""
    check = row.verify
    trains = "Its training was not verified"
    if check:
        trains = "It does not train as simulated"
    if check and check.passed:
        trains = f"After {plural(check.steps, 'step')}: {describe_simulated(check)}"
    speed = times_as_fast(row.ratio, baseline.name)
    text = f"`{row.name}` is lossy, so it does not count as fastest: {speed}. {trains}."
    apart = check and check.excused and check.excused.max_difference
    return Finding("lossy", text, {"speed_up": row.ratio.to_dict(), "difference": apart})


def _same(rows: list[Row]) -> Iterator[Finding]:
    checked = [(row, row.verify) for row in rows if row.verify is not None]
    if not checked:
        yield Finding("same", "No configuration was verified, so they may train differently.", {})
        return
    equal = [check for _, check in checked if check.equal]
    excused = [check.excused for check in equal if check.excused and apart_from(check)]
    largest = max((check.max_difference or 0.0 for check in equal), default=0.0)
    like = alike(len(equal), len(checked))
    text = (
        f"{like} (fp64, largest parameter difference {difference(largest)})."
        if equal
        else f"{like}."
    )
    if excused:
        fixed = "; ".join(dict.fromkeys(why for excuse in excused for why in excuse.reasons))
        text += f" For {len(excused)} of them, known reasons to differ were held fixed: {fixed}."
    simulated = [row.name for row, check in checked if check.as_simulated]
    if less := [f"`{r.name}` ({c.proof_batch})" for r, c in checked if c.ran and c.proof_batch]:
        text += f" Proved with a smaller batch, because fp64 needs more memory: {', '.join(less)}."
    if simulated:
        text += f" As simulated, but lossy: {_list(simulated)}."
    evidence = {"equal": len(equal), "as_simulated": len(simulated), "of": len(checked)}
    tolerance = {"tolerance": checked[0][1].tolerance}
    yield Finding("same", text, evidence | {"max_difference": largest} | tolerance)
    wrong: dict[tuple[str, str], dict[str, float | None]] = defaultdict(dict)
    for row, check in checked:
        if not check.passed:
            than = "a single device" if check.as_simulated is None else "its simulation"
            verb = f"differs from {than}" if check.ran else "could not be proved, because it failed"
            wrong[verb, (check.cause or "").rstrip(".")][row.name] = check.max_difference
    for (verb, cause), rows_ in wrong.items():
        several = verb.replace("differs", "differ").replace("it failed", "they failed")
        text = f"{_list(list(rows_))} {verb if len(rows_) == 1 else several}: {cause}."
        yield Finding("warning", text, tolerance | {"max_differences": rows_})


def _busy(baseline: Row, machine_cores: int) -> Iterator[Finding]:
    """Warn if a device got too little CPU time, because other processes used the machine. A model
    that sleeps or waits for data also uses less than its cores, but no thread waits for a core."""
    load, asked = baseline.metrics.load, baseline.threads_per_device
    cores, waiting = load.cores_per_rank[0], next(iter(load.waiting_per_rank), None)
    alone = baseline.strategy == "single" and baseline.device == "cpu"
    too_few = cores is not None and cores <= BUSY * min(asked, machine_cores)
    if alone and too_few and (waiting or 0.0) >= (1 - BUSY) * asked:
        threads = plural(round(waiting or 0.0, 2), "thread")
        text = (
            f"Other processes used this machine: `{baseline.name}` used {cores:.2f} of its "
            f"{plural(asked, 'core')}, and on average {threads} had to wait for a core. Measure again "
            "on an idle machine."
        )
        evidence = {"cores_used": cores, "cores_asked": asked, "waiting_threads": waiting}
        yield Finding("warning", text, evidence)


def _warnings(comparison: Comparison) -> Iterator[Finding]:
    """List everything that went wrong: warnings, failures, and omitted configurations."""
    for row in comparison.rows:
        yield from (Finding("warning", f"`{row.name}`: {text}.", {}) for text in row.warnings)
    for failed in comparison.failed:
        text = f"`{failed.name}` failed: {failed.error}"
        yield Finding("warning", text, {"command": failed.command})
    reasons: dict[str, list[str]] = defaultdict(list)
    for each in comparison.left_out:
        reasons[each.reason].append(each.name)
    for reason, names in reasons.items():
        were = "was" if len(names) == 1 else "were"
        yield Finding("warning", f"{_list(names)} {were} left out: {reason}", {"left_out": names})
