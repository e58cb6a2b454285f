"""Reject configurations that can never run, whatever the model."""

from __future__ import annotations

import math
import shutil

from paralab.errors import UsageError, unknown
from paralab.plan.lossy import check_lossy
from paralab.plan.option import check_kind, options_of
from paralab.plan.request import (
    STRATEGIES,
    Request,
    count_shards,
    count_stages,
    has_process_per_cell,
    has_shards,
    prefix_words,
    splits_layers,
)


def check(request: Request) -> None:
    """Reject a configuration that can never run, on any machine with any model."""
    if request.strategy not in STRATEGIES:
        raise unknown("strategy", request.strategy, STRATEGIES)
    _check_each_option(request)
    _check_combinations(request)
    check_lossy(request)
    if request.prefix is not None:
        _check_prefix(request.prefix)


def _check_each_option(request: Request) -> None:
    """Require that the strategy accepts each given option, and that the value is valid."""
    for option in options_of(Request):
        value = getattr(request, option.name)
        check_kind(option, value)
        if value is None:
            continue

        if not option.applies_to(request.strategy):
            given = option.flag if value is True else f"{option.flag} {value}"
            raise UsageError(
                f"{request.strategy} has no option {given}.",
                fix=f"leave out {option.flag}, or use one of: {', '.join(option.strategies)}",
            )
        if option.choices and value not in option.choices:
            raise unknown(option.flag, str(value), map(str, option.choices))
        is_number = option.kind in (int, float) and option.name not in ("seed", "outer_momentum")
        if is_number and not (value > 0 and math.isfinite(value)):
            shown = f"{value:g}" if isinstance(value, float) else value
            problem = f"{option.flag} {shown} is not a positive number."
            fix = "1 or more" if option.kind is int else "with a number greater than 0"
            raise UsageError(problem, fix=f"{option.flag} {fix}")
    if not 0 <= request.seed < 2**32:
        raise UsageError(f"--seed {request.seed} is not between 0 and {2**32 - 1}.", fix="--seed 0")


def _check_combinations(request: Request) -> None:
    """Reject options that do not work together."""
    if (request.loss_scale or request.no_scaler) and request.precision != "fp16":
        given = f"--loss-scale {request.loss_scale:g}" if request.loss_scale else "--no-scaler"
        raise UsageError(
            f"{given} only works with fp16: {request.precision or 'fp32'} has no GradScaler.",
            fix="--precision fp16, or leave out the option",
        )
    if request.no_scaler and request.loss_scale:
        raise UsageError(
            "--loss-scale sets the GradScaler's scale, but --no-scaler turns the GradScaler off.",
            fix="leave out one of the two",
        )

    accumulate = request.accumulate or 1
    if request.sync_every_pass and accumulate < 2:
        raise UsageError(
            "--sync-every-pass needs at least 2 accumulation steps, not 1.",
            fix="--accumulate 4 --sync-every-pass",
        )
    if request.static_graph and not request.sync_every_pass and accumulate > 1:
        raise UsageError(
            f"--static-graph does not work with --accumulate {accumulate}: DDP records the graph "
            "in the first backward pass, but accumulation does not synchronize that pass.",
            fix="leave out one of the two",
        )

    if request.zero == 1 and request.shard_groups:
        raise UsageError(
            f"--shard-groups {request.shard_groups} groups ranks that shard parameters, but "
            "--zero 1 does not shard parameters.",
            fix="--zero 2 or --zero 3, or leave out --shard-groups",
        )
    if request.recompute == "selective" and request.compile:
        raise UsageError(
            "--recompute selective decides operator by operator what to keep, but --compile merges "
            "operators.",
            fix="--recompute full, or leave out one of the two",
        )
    if request.recompute == "selective" and request.schedule == "zero-bubble":
        raise UsageError(
            "--schedule zero-bubble recomputes each block twice, for the gradients of its input "
            "and of its weights, but --recompute selective keeps its tensors for only one "
            "recomputation.",
            fix="--recompute full, or another schedule",
        )
    flag = f"--shards {request.shards}" if has_shards(request) else f"--zero {request.zero}"
    flag = f"--schedule {request.schedule}" if request.schedule else flag
    if has_process_per_cell(request) and request.placement == "same":
        raise UsageError(
            f"{flag} gives each stage its own process and device, "
            "but --placement same puts all stages on one device.",
            fix="leave out one of the two",
        )
    if has_process_per_cell(request) and request.bucket_view:
        raise UsageError(
            f"--bucket-view is a DDP option, but {flag} does not use DDP.",
            fix="leave out one of the two",
        )
    if request.strategy == "hybrid":
        _check_grid(request)


def _check_grid(request: Request) -> None:
    """Reject combinations of axes that hybrid does not support."""
    stages, shards = count_stages(request), count_shards(request)
    if splits_layers(request) and stages == 1 and (request.schedule or request.micro_batches):
        given, instead = f"--schedule {request.schedule}", "leave out --schedule"
        if request.micro_batches:
            given, instead = f"--micro-batches {request.micro_batches}", "--accumulate"
        raise UsageError(
            f"{given} is for a pipeline, but --stages 1 has none.", fix=f"{instead}, or --stages 2"
        )
    if request.zero == 3 and request.schedule == "zero-bubble":
        raise UsageError(
            "--schedule zero-bubble splits each backward pass in two, and the second half needs the "
            "parameters that --zero 3 frees after the first.",
            fix="--zero 2, or --schedule 1f1b",
        )
    if request.zero and stages == 1 and shards == 1:
        raise UsageError(
            f"hybrid --zero {request.zero} with one stage and one shard is the same as fsdp.",
            fix=f"fsdp --zero {request.zero}, or --shards 2",
        )


def _check_prefix(prefix: str) -> None:
    try:
        command = prefix_words(prefix, 0, 0)[0]
    except (KeyError, IndexError, ValueError) as error:
        problem = f"--prefix {prefix!r} is not a valid command: {error}."
        raise UsageError(problem, fix="only the placeholders {rank} and {local_rank}") from error
    if not shutil.which(command):
        problem = f"--prefix {prefix!r}: there is no command {command!r} on this machine."
        raise UsageError(problem, fix="a command that is on your PATH")
