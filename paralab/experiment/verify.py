"""`paralab verify`: check on the user's model that a strategy trains like a single device.

Each configuration trains for a few steps and is compared with a reference: the same samples and
initial weights on a single device. Known reasons for a difference are BatchNorm, random numbers,
low precision, and a stateful forward. The check removes them on both sides and reports their
effect separately. All configurations share one launch.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from paralab.analyse.verify import WAYS, Skipped, Verified, VerifyOptions, VerifyResult
from paralab.errors import UsageError, unknown
from paralab.experiment.planning import inspection_for, resolve_here
from paralab.experiment.reference_runs import ReferenceRuns
from paralab.experiment.shared_launch import train_all
from paralab.launch.inspect import Inspected, inspect_workload
from paralab.launch.job import Print
from paralab.launch.launched_by import refuse_inside
from paralab.launch.run_options import Deadlines, RunOptions
from paralab.plan.batches import global_batches, shares
from paralab.plan.check import check
from paralab.plan.check_model import UNGATHERED
from paralab.plan.compile import NOT_COMPILED
from paralab.plan.plan import Plan
from paralab.plan.request import (
    DIVIDED,
    PIPELINED,
    STAGED,
    STRATEGIES,
    Options,
    Request,
    count_shards,
    only_applicable,
    uses_blocks,
)
from paralab.plan.schedules import SCHEDULES, WITHOUT
from paralab.plan.sharding import BRANCHES, MIXED_DTYPES, NOT_ON_SHARDS
from paralab.record.folder import RunFolder
from paralab.units import plural
from paralab.workload.reference import check_reference
from paralab.workload.summary import Summary

DEFAULT_WORKLOADS = ("mlp:tiny", "gpt:tiny")  # fixed and varying token counts per batch
DEFAULT_WITH_EXPERTS = ("moe:tiny",)
DEFAULT_STEPS = 4
ONE_SAMPLE = "Expected more than 1 value per channel"  # the error from torch's BatchNorm
STEP_DEADLINE = 120.0  # seconds
SELECTIVE = ("dp", "fsdp", "hybrid")  # the other strategies recompute entire blocks


@dataclass(frozen=True)
class Case:
    """One configuration to verify. Its `options` distinguish it from the others."""

    request: Request
    options: VerifyOptions
    plan: Plan
    inspected: Inspected


def verify(
    strategy: str,
    workloads: Sequence[str],
    out: Path | None = None,
    say: Print = lambda line: None,
    step_deadline: float = STEP_DEADLINE,
    **options: Any,
) -> VerifyResult:
    """Check that a strategy, or `all`, trains like a single device. The given options apply to every
    configuration; all other options vary."""
    refuse_inside()
    if strategy not in (*STRATEGIES, "all"):
        raise unknown("strategy", strategy, [*STRATEGIES, "all"])
    limits = RunOptions(step_deadline=step_deadline)
    limits.check()
    started = time.perf_counter()

    names = list(STRATEGIES) if strategy == "all" else [strategy]
    inspected: dict[Request, Inspected] = {}
    usual = DEFAULT_WITH_EXPERTS if strategy in DIVIDED else DEFAULT_WORKLOADS
    for reference in map(check_reference, workloads or usual):
        base = Request("single", reference, **options)
        blocks = strategy == "all" or uses_blocks(base)
        inspection = inspection_for(base, names, threads=1, verify=True, blocks=blocks)
        inspected[base] = inspect_workload(inspection)
    cases, skipped = _resolve(names, inspected)
    summaries = [summary for _, summary in inspected.values()]
    folder = RunFolder.create(out, f"verify_{strategy}")
    folder.write_manifest(
        kind="verify",
        machine=asdict(cases[0].inspected.machine),
        workload=[asdict(summary) for summary in summaries],
        configurations=[
            {"options": case.options.to_dict(), "plan": case.plan.to_json()} for case in cases
        ],
    )

    verified = _train(folder, cases, say, limits.deadlines)
    # Only training shows that some strategies cannot run this model.
    unable = [each for each in verified if _cannot_run(each, strategy)]
    if able := [each for each in verified if each not in unable]:
        verified = able
        skipped += [Skipped.like(each, reason=each.cause or "") for each in unable]
    dropout = any(summary.dropout for summary in summaries)
    result = VerifyResult(
        strategy=strategy,
        workloads=[summary.name for summary in summaries],
        precision=cases[0].plan.precision,
        passed=all(each.passed for each in verified),
        # Lossy configurations may need more steps than the others.
        steps=min((each.steps for each in verified if each.steps), default=0),
        configurations=verified,
        skipped=skipped,
        dropout="switched off on both sides" if dropout else "none",
        state={summary.name: list(summary.state) for summary in summaries if summary.state},
        seconds=round(time.perf_counter() - started, 3),
        run_folder=str(folder.path),
    )
    folder.write("result.json", result.to_dict())
    return result


def _resolve(
    names: list[str], inspected: dict[Request, Inspected]
) -> tuple[list[Case], list[Skipped]]:
    """Return the cases that can run and the skipped ones. If none can run, raise the first error."""
    cases: list[Case] = []
    skipped: list[Skipped] = []
    refused: UsageError | None = None
    for base, each in inspected.items():
        for request, options in _vary(names, base, each.summary, pinned=len(names) == 1):
            try:
                cases.append(Case(request, options, resolve_here(request, each), each))
            except UsageError as error:
                refused, reason = refused or error, error.problem
                skipped.append(Skipped(strategy=request.strategy, options=options, reason=reason))
    if not cases:
        assert refused is not None
        raise refused
    return cases, skipped


def _cannot_run(each: Verified, strategy: str) -> bool:
    """Return whether a configuration that `verify` chose does not suit the model. BatchNorm rejects
    parts of one sample, a schedule cannot cut the model, or torch.compile cannot compile it. Or
    fsdp ranks take different branches, torch cannot run the optimizer on shards, or dp cannot
    gather outputs.
    """
    cause = each.cause or ""
    if strategy != "all":  # the user chose the strategy, and verify chose the split
        return ONE_SAMPLE in cause or UNGATHERED in cause
    uncut = each.options.schedule is not None and WITHOUT in cause
    uncompiled = bool(each.options.compile) and NOT_COMPILED in cause
    known = (BRANCHES, MIXED_DTYPES, NOT_ON_SHARDS, UNGATHERED, ONE_SAMPLE)
    return uncut or uncompiled or any(each in cause for each in known)


def _vary(
    names: list[str], base: Request, summary: Summary, pinned: bool
) -> Iterator[tuple[Request, VerifyOptions]]:
    """Yield all combinations of options that were not given: accumulation, even and uneven splits,
    and a full and a partial last batch. `pinned` means that the user named the strategy."""
    batch = base.batch_size or summary.batch_size
    steps = base.steps or (None if base.epochs else DEFAULT_STEPS)
    common = replace(
        base, steps=steps, precision=base.precision or "fp64", compile=base.compile or None
    )
    for name in names:
        if pinned:
            check(replace(base, strategy=name))
        splits = _splits(name, base, pinned)
        if not pinned:
            splits += _with_blocks(name, base, summary, splits)
        for split in splits:
            accumulations = _accumulations(name, base, summary, split)
            combinations = list(product(accumulations, _lengths(base, summary, batch)))
            # Test these options only with the hardest combination; plain splits cover the others.
            in_grid = name == "hybrid" and not split.keys().isdisjoint(("shards", "zero"))
            if in_grid or (not pinned and not split.keys().isdisjoint(WAYS)):
                combinations = combinations[-1:]
            for accumulate, samples in combinations:
                varied: Options = {"accumulate": accumulate, "samples": samples, **split}
                request = only_applicable(replace(common, strategy=name, **varied))
                batches = global_batches(batch, samples or summary.samples, steps, base.epochs)
                options = VerifyOptions.like(
                    request,
                    workload=summary.name,
                    batch_size=batch,
                    partial_last_batch={each.size for each in batches} != {batch},
                    varying_weights=summary.weighted,
                )
                yield request, options


def _accumulations(name: str, base: Request, summary: Summary, split: Options) -> list[int]:
    """Return the numbers of accumulation steps: 1, and 4 or as many as the batch allows."""
    if base.accumulate:
        return [base.accumulate]
    batch = base.batch_size or summary.batch_size
    # BatchNorm needs two samples per pass, even in the last batch, which has 3/4 of the samples.
    batch = batch * 3 // 8 if summary.batch_norms else batch
    replicas, micro_batches = split.get("replicas", 1), split.get("micro_batches", 1)
    if name in DIVIDED:
        replicas = split.get("shards") or count_shards(replace(base, strategy=name))
    most = batch // replicas if name == "dp" else min(shares(batch, replicas)) // micro_batches
    return [1, min(4, most)] if most > 1 else [1]


def _splits(name: str, base: Request, pinned: bool) -> list[Options]:
    """Return even and uneven splits: 2 and 3 replicas or, with stages, 2 and 3 micro-batches, and
    each schedule with one process per stage."""
    if name in ("dp", "ddp", "fsdp", "local-sgd"):
        groups = base.shard_groups or 1
        splits = [{}] if base.replicas else [{"replicas": 2 * groups}, {"replicas": 3 * groups}]
        if name == "local-sgd" and not pinned:
            return _ways_to_average(base, splits)
        if name == "ddp" and not pinned:
            return splits + _ways_to_compress(base, splits)
        return splits if pinned or name != "fsdp" else splits + _ways_to_shard(base, splits[-1])
    if name in ("tp", "ep"):
        # An odd number of shards rarely divides a model's heads or experts.
        return [{}] if base.shards else [{"shards": n} for n in ((2, 4) if pinned else (2,))]
    given: Options = {"stages": base.stages or 2} if name in STAGED else {}
    if name not in PIPELINED:
        return [given]
    given |= {"replicas": base.replicas or 2} if name == "hybrid" else {}
    if base.stages == 1 and (base.shards or 1) > 1:  # no pipeline
        return [given]
    numbers = [base.micro_batches] if base.micro_batches else [2, 3]
    splits = [given | {"micro_batches": number} for number in numbers]
    if base.schedule or base.placement:
        return splits
    if name == "hybrid":
        splits = [*_grids(base, splits[-1]), *splits]
    if pinned:
        return splits
    schedules = SCHEDULES if name == "pipeline" else ("1f1b", "zero-bubble")
    return splits + [splits[-1] | {"schedule": schedule} for schedule in schedules]


def _grids(base: Request, split: Options) -> list[Options]:
    """Return grids with multiple shards or sharded replicas: with a pipeline, and without one."""
    if base.shards or base.stages or base.micro_batches or base.zero:
        return []
    flat = {"replicas": split["replicas"], "stages": 1, "shards": 2}
    deep = split | {"schedule": "1f1b"}
    return [deep | {"shards": 2}, deep | {"zero": 3}, flat, flat | {"zero": 3}]


def _ways_to_shard(base: Request, split: Options) -> list[Options]:
    """Return fsdp's other ways to shard, unless the user chose one."""
    if base.zero or base.shard_groups:
        return []
    ways = [split | {"zero": zero} for zero in (1, 2)]
    replicas = base.replicas or 4
    can_group = replicas % 2 == 0 and replicas > 2
    return ways + [{"replicas": replicas, "shard_groups": 2}] * can_group


def _ways_to_average(base: Request, splits: list[Options]) -> list[Options]:
    """Return options for plain averaging and, unless the user set its options, DiLoCo."""
    every = base.sync_every or 2
    plain = [split | {"sync_every": every} for split in splits[:1]]
    if base.outer_lr or base.outer_momentum:
        return plain
    return [*plain, splits[-1] | {"sync_every": every, "outer_lr": 0.7, "outer_momentum": 0.9}]


def _ways_to_compress(base: Request, splits: list[Options]) -> list[Options]:
    if base.compress or base.compile:
        return []
    return [splits[-1] | {"compress": kind} for kind in ("bf16", "powersgd")]


def _with_blocks(
    name: str, base: Request, summary: Summary, splits: list[Options]
) -> list[Options]:
    """Return one configuration that recomputes blocks, if the model supports it, for ddp one that
    compiles them, and for tp one that splits their tokens. Compiling is slow, so no other strategy
    does it."""
    plain = [split for split in splits if split.keys().isdisjoint(WAYS)] or splits[:1]
    mode = "selective" if name in SELECTIVE else "full"
    can_recompute = any(mode in block.recomputes for block in summary.blocks)
    blocks: list[Options] = []
    if can_recompute and not base.recompute:
        blocks.append(plain[-1] | {"recompute": mode})
    if summary.blocks and name == "ddp" and base.compile is None:
        blocks.append(plain[0] | {"compile": True})
    if summary.blocks and name == "tp" and base.sequence_parallel is None:
        blocks.append(plain[0] | {"sequence_parallel": True})
    return blocks


def _lengths(base: Request, summary: Summary, batch: int) -> list[int | None]:
    """Return two epoch sizes, in samples: one ends with a full batch, one with a partial batch."""
    if base.samples or base.epochs:
        return [base.samples]
    steps = base.steps or DEFAULT_STEPS
    # A last batch of two samples is smaller than three replicas. BatchNorm needs a larger last
    # batch, because it cannot train on single samples.
    last = batch * 3 // 4 if summary.batch_norms else min(2, batch - 1)
    whole, partial = steps * batch, (steps - 1) * batch + last
    room = summary.samples if summary.samples is not None else whole
    return [length for length in (whole, partial) if length <= room] or [None]


def _train(
    folder: RunFolder, cases: list[Case], say: Print, deadlines: Deadlines
) -> list[Verified]:
    """Run the references and all configurations, and compare them."""
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        references = ReferenceRuns(folder.path, Path(private))
        # Run schedules and compiled blocks last. If a model cannot be cut into processes or
        # compiled, all ranks stop and must be restarted for the remaining runs.
        last = [case.plan.schedule is not None or case.plan.compile for case in cases]
        order = sorted(range(len(cases)), key=last.__getitem__)
        pairs = {
            place: references.add(f"case{place}", cases[place].request, cases[place].inspected)
            for place in order
        }
        ranks = max(training.plan.world_size for training in references.trainings)
        count = plural(len(references.references), "reference")
        say(f"{count} and {plural(len(cases), 'configuration')} on up to {plural(ranks, 'rank')}")
        failed = train_all(folder, references.trainings, deadlines=deadlines)
    for number, error in failed.items():
        if references.is_reference(number):
            raise error
    return [
        Verified.like(
            references.judge(pairs[place], failed),
            strategy=case.plan.strategy,
            options=case.options,
            arithmetic=case.plan.arithmetic,
        )
        for place, case in enumerate(cases)
    ]
