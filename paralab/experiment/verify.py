"""Parallel equals serial, checked on the user's model: `paralab verify` and `paralab.verify`.

Every configuration trains a few steps and is compared with a reference: the same samples, from the
same weights, on a single device. If the two may differ for a good reason (BatchNorm, random
numbers, low precision, a stateful forward), the check removes the reason on both sides and reports
separately how large its effect is. All configurations share one launch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from msgspec.structs import asdict as asdict_fields

from paralab.analyse.verify import Skipped, Verified, VerifyOptions, VerifyResult
from paralab.errors import UsageError, unknown
from paralab.experiment.planning import probe_once
from paralab.experiment.reference_runs import ReferenceRuns
from paralab.experiment.shared_launch import train_all
from paralab.launch.deadlines import Deadlines
from paralab.launch.inspect import inspect_workload
from paralab.launch.launched_by import refuse_inside
from paralab.machine.host import Machine, threads_asked
from paralab.plan.batches import global_batches, shares
from paralab.plan.check import check
from paralab.plan.plan import Plan
from paralab.plan.request import APPLIES, STRATEGIES, Request, only_applicable
from paralab.plan.resolve import resolve
from paralab.plan.schedules import SCHEDULES, WITHOUT
from paralab.plan.sharding import BRANCHES, needs_units
from paralab.record.folder import RunFolder
from paralab.units import plural
from paralab.workload.reference import check_reference
from paralab.workload.summary import Inspection, Summary

DEFAULT_WORKLOADS = ("mlp:tiny", "gpt:tiny")  # fixed batches, and varying numbers of tokens
DEFAULT_STEPS = 4
Split = dict[str, Any]  # some of the options of Request
STEP_DEADLINE = 120.0  # seconds: a longer step counts as a hang


@dataclass(frozen=True)
class Check:
    """One configuration to verify, and the options that distinguish it from the others."""

    request: Request
    options: VerifyOptions


@dataclass(frozen=True)
class Ready:
    case: Check
    plan: Plan


def verify(
    strategy: str,
    workloads: Sequence[str],
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    step_deadline: float = STEP_DEADLINE,
    **options: Any,
) -> VerifyResult:
    """Check that a strategy (or `all`) trains like one device. Given options apply to every
    configuration; the others vary."""
    refuse_inside()
    if strategy not in (*STRATEGIES, "all"):
        raise unknown("strategy", strategy, [*STRATEGIES, "all"])
    deadlines = Deadlines(step=step_deadline)
    deadlines.check()
    started = time.perf_counter()
    workloads = workloads or DEFAULT_WORKLOADS
    names = [strategy] if strategy != "all" else list(STRATEGIES)
    ready: list[Ready] = []
    skipped: list[Skipped] = []
    refused: UsageError | None = None
    seen: list[tuple[Machine, Summary]] = []
    for reference in map(check_reference, workloads):
        wants_layers = any(name in APPLIES["stages"] for name in names)
        units = any(map(needs_units, names))
        machine, summary = inspect_workload(
            Inspection(
                reference,
                options.get("device", "auto"),
                threads=1,
                layers=wants_layers,
                units=units,
                proof=True,
            )
        )
        seen.append((machine, summary))
        for case in _cases(
            names,
            Request(strategy="single", workload=reference, **options),
            summary,
            pinned=strategy != "all",
        ):
            try:
                plan = resolve(case.request, machine, summary, probe_once, threads_asked())
            except UsageError as error:
                refused = refused or error
                skipped.append(
                    Skipped(
                        strategy=case.request.strategy, options=case.options, reason=error.problem
                    )
                )
                continue
            ready.append(Ready(case, plan))
    if not ready:
        assert refused is not None
        raise refused
    folder = RunFolder.create(out, f"verify_{strategy}")
    folder.write_manifest(
        kind="verify",
        machine=asdict(seen[0][0]),
        workload=[asdict(summary) for _, summary in seen],
        configurations=[
            {"options": r.case.options.to_dict(), "plan": r.plan.to_json()} for r in ready
        ],
    )
    cases = _train(
        folder, ready, dict(zip(map(check_reference, workloads), seen, strict=True)), say, deadlines
    )
    if strategy == "all":  # a strategy may also refuse the model while it trains
        refused_late = [case for case in cases if _refuses(case)]
        skipped += [
            Skipped(strategy=case.strategy, options=case.options, reason=case.cause or "")
            for case in refused_late
        ]
        cases = [case for case in cases if case not in refused_late]
    result = VerifyResult(
        strategy=strategy,
        workloads=[summary.name for _, summary in seen],
        precision=ready[0].plan.precision,
        passed=all(case.equal for case in cases),
        steps=max(case.steps for case in cases),
        configurations=cases,
        skipped=skipped,
        dropout="switched off on both sides"
        if any(summary.dropout for _, summary in seen)
        else "none",
        state={summary.name: list(summary.state) for _, summary in seen if summary.state},
        seconds=round(time.perf_counter() - started, 3),
        run_folder=str(folder.path),
    )
    folder.write_result(result.to_dict())
    return result


def _refuses(case: Verified) -> bool:
    """Whether the strategy refused the model: a schedule that cannot split it into processes, or
    fsdp ranks that take different branches."""
    cause = case.cause or ""
    return (bool(case.options.schedule) and WITHOUT in cause) or (
        case.strategy == "fsdp" and BRANCHES in cause
    )


def _cases(names: list[str], base: Request, summary: Summary, pinned: bool) -> Iterator[Check]:
    """Every combination of the options that were not given: accumulation, even and uneven splits, a
    full and a partial last batch."""
    batch = base.batch_size or summary.batch_size
    for name in names:
        if pinned:
            check(replace(base, strategy=name))
        lengths = _lengths(base, summary, batch)
        for split in _splits(name, base, pinned):
            # BatchNorm cannot train on single samples, and its last batch is smaller (`_lengths`).
            room = batch * 3 // 8 if summary.batch_norms else batch
            passes = [base.accumulate] if base.accumulate else _passes(name, room, split)
            for accumulate in passes:
                for samples in lengths:
                    # The schedules of a pipeline over processes differ only in their order: the
                    # hardest configuration of each is enough.
                    if (
                        not pinned
                        and "schedule" in split
                        and (accumulate, samples) != (passes[-1], lengths[-1])
                    ):
                        continue
                    steps = base.steps or (None if base.epochs else DEFAULT_STEPS)
                    asked = replace(
                        base,
                        strategy=name,
                        accumulate=accumulate,
                        samples=samples,
                        steps=steps,
                        **split,
                    )
                    asked = replace(asked, precision=base.precision or "fp64")
                    asked = only_applicable(asked)
                    sizes = {
                        b.size
                        for b in global_batches(
                            batch, samples or summary.samples, steps, base.epochs
                        )
                    }
                    yield Check(asked, _named(asked, batch, sizes != {batch}, summary))


def _passes(name: str, batch: int, split: Split) -> list[int]:
    """One accumulation step, and four, or as many as the batch has samples for."""
    replicas, micro_batches = split.get("replicas", 1), split.get("micro_batches", 1)
    most = batch // replicas if name == "dp" else min(shares(batch, replicas)) // micro_batches
    return [1, min(4, most)] if most > 1 else [1]


def _splits(name: str, base: Request, pinned: bool) -> list[Split]:
    """Even and uneven splits: 2 and 3 replicas; for stages 2 and 3 micro-batches, and a process per
    stage."""
    if name in ("dp", "ddp", "fsdp"):
        return [{}] if base.replicas else [{"replicas": 2}, {"replicas": 3}]
    if name in ("pipeline", "hybrid"):
        given = {"stages": base.stages or 2} | (
            {"replicas": base.replicas or 2} if name == "hybrid" else {}
        )
        splits = (
            [given]
            if base.micro_batches
            else [given | {"micro_batches": number} for number in (2, 3)]
        )
        if pinned or base.schedule or base.placement:
            return splits
        schedules = SCHEDULES if name == "pipeline" else ("1f1b", "zero-bubble")
        return splits + [splits[-1] | {"schedule": schedule} for schedule in schedules]
    return [{"stages": base.stages or 2}] if name == "mp" else [{}]


def _lengths(base: Request, summary: Summary, batch: int) -> list[int | None]:
    """Samples per epoch such that the last batch is full, and such that it is not."""
    if base.samples or base.epochs:
        return [base.samples]
    steps = base.steps or DEFAULT_STEPS
    # Two samples, fewer than three replicas. With BatchNorm more: it cannot train on single
    # samples.
    last = batch * 3 // 4 if summary.batch_norms else min(2, batch - 1)
    whole, partial = steps * batch, (steps - 1) * batch + last
    room = summary.samples if summary.samples is not None else whole
    return [length for length in (whole, partial) if length <= room] or [None]


def _named(request: Request, batch: int, partial: bool, summary: Summary) -> VerifyOptions:
    return VerifyOptions(
        workload=summary.name,
        batch_size=batch,
        partial_last_batch=partial,
        varying_weights=summary.weighted,
        accumulate=request.accumulate,
        replicas=request.replicas,
        stages=request.stages,
        micro_batches=request.micro_batches,
        schedule=request.schedule,
    )


def _train(
    folder: RunFolder,
    ready: list[Ready],
    seen: dict[str, tuple[Machine, Summary]],
    say: Callable[[str], None],
    deadlines: Deadlines,
) -> list[Verified]:
    """Run the references and all configurations, and judge each."""
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        beside = ReferenceRuns(folder.path, Path(private))
        # A model that cannot be split into processes fails and ends all ranks, and new ranks are
        # started for the rest. So these configurations come last.
        order = sorted(range(len(ready)), key=lambda place: ready[place].plan.schedule is not None)
        proofs = {
            place: beside.add(f"case{place}", item.case.request, *seen[item.case.request.workload])
            for place, item in ((place, ready[place]) for place in order)
        }
        ranks = max(job.plan.world_size for job in beside.jobs)
        references = plural(len(beside.references), "reference")
        say(
            f"{references} and {plural(len(ready), 'configuration')} on up to {plural(ranks, 'rank')}"
        )
        failed = train_all(folder, beside.jobs, deadlines=deadlines)
    for number, error in failed.items():
        if beside.is_reference(number):
            raise error
    return [
        Verified(
            strategy=item.plan.strategy,
            options=item.case.options,
            arithmetic=item.plan.arithmetic,
            **asdict_fields(beside.verdict(proofs[place], failed)),
        )
        for place, item in enumerate(ready)
    ]
