"""`paralab compare` and `scale`: measure and verify configurations of one model side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from msgspec.structs import replace as replace_fields

from paralab.analyse.compare import Comparison, comparison_of
from paralab.analyse.manifest import About
from paralab.errors import Interrupted, UsageError, unknown
from paralab.experiment.configurations import Configuration, resolve_all
from paralab.experiment.planning import look_once, slug
from paralab.experiment.rounds import BUDGET_SECONDS, ROUNDS, measure, plan_rounds
from paralab.machine.signals import exit_code_of, name_of
from paralab.plan.option import flag_of, options_of
from paralab.plan.request import APPLIES, STRATEGIES, Options, Request, only_applicable
from paralab.record.folder import RunFolder
from paralab.units import plural


def default_configurations(base: Request) -> list[Configuration]:
    """Return each strategy on two devices, and each low precision that this machine supports."""
    machine, _ = look_once(base, ["pipeline", "hybrid"])
    on_gpu = bool(machine.gpus) and base.device != "cpu"
    low = ("tf32", "bf16", "fp16") if on_gpu else ("bf16",)
    asked: list[Options] = [
        {"strategy": "single"},
        {"strategy": "dp"},
        {"strategy": "ddp"},
        {"strategy": "ddp", "accumulate": 4},
        *({"strategy": "ddp", "precision": precision} for precision in low),
        {"strategy": "ddp", "precision": "bf16", "accumulate": 4},
        {"strategy": "pipeline"},
        {"strategy": "hybrid"},
    ]
    return [
        Configuration(with_common(base, own), optional=number > 3)
        for number, own in enumerate(asked)
    ]


def with_common(base: Request, own: Options) -> Request:
    """Build a configuration from its own options and the common ones that apply to its strategy."""
    known = [field.name for field in fields(Request)]
    for name in own:
        if name not in known:
            raise unknown("option", name, known)
    strategy = own.get("strategy")
    if not isinstance(strategy, str):
        raise UsageError(
            f"The configuration {own} has no strategy.", fix='{"strategy": "ddp", "replicas": 2}'
        )
    common = Request(strategy)  # a later check refuses an unknown strategy
    if strategy in STRATEGIES:
        common = only_applicable(replace(base, strategy=strategy))
    return replace(common, **own)


def scale_configurations(base: Request, counts: str, weak: bool) -> list[Configuration]:
    """Return the strategy with 1, 2, 4 … replicas; with `weak`, the batch grows with them."""
    try:
        numbers = sorted({int(word) for word in counts.split(",")})
    except ValueError:
        raise UsageError(
            f"--replicas {counts}: not a list of numbers.", fix="--replicas 1,2,4"
        ) from None
    if base.strategy not in APPLIES["replicas"]:
        raise UsageError(
            f"{base.strategy} has no replicas to scale.",
            fix="one of: " + ", ".join(APPLIES["replicas"]),
        )
    if len(numbers) < 2 or numbers[0] < 1:
        raise UsageError(
            f"--replicas {counts}: scaling needs at least two different positive numbers.",
            fix="--replicas 1,2,4",
        )
    _, summary = look_once(base, [base.strategy])
    batch = base.batch_size or summary.batch_size
    return [
        Configuration(
            replace(base, replicas=n, batch_size=batch * n // numbers[0] if weak else batch)
        )
        for n in numbers
    ]


def compare(
    configurations: Sequence[Configuration],
    *,
    kind: str = "compare",
    about: About | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    verify: bool = True,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Measure the configurations and compute the comparison from the run folders."""
    started = time.perf_counter()
    if rounds is not None and rounds < 1:
        raise UsageError(
            f"{rounds} is not a valid number of rounds.",
            fix="at least 1 round, and 3 for an interval",
        )
    if steps is not None:
        configurations = [
            replace(each, request=replace(each.request, steps=each.request.steps or steps))
            for each in configurations
        ]
    workloads = list(dict.fromkeys(each.request.workload for each in configurations))
    if kind == "compare" and len(workloads) > 1:
        raise UsageError(
            f"Different workloads cannot be compared: {', '.join(workloads)}.",
            fix="--workload once, outside the quotes",
        )
    resolved, left_out = resolve_all(with_distinct_names(configurations))

    folder = RunFolder.create(out, f"{kind}_{slug(resolved[0].summary.name)}")
    entries = plan_rounds(resolved, rounds or ROUNDS)
    folder.write_manifest(
        kind=kind,
        about=(about or About()).to_dict(),
        machine=asdict(resolved[0].machine),
        workload=asdict(resolved[0].summary),
        left_out=[each.to_dict() for each in left_out],
        configurations=[entry.to_dict() for entry in entries],
    )
    measured = measure(folder, resolved, entries, verify, say, None if rounds else BUDGET_SECONDS)
    folder.write_outcome(measured.to_dict())
    seconds = round(time.perf_counter() - started, 3)
    result = replace_fields(comparison_of(folder.path), seconds=seconds)
    folder.write_result(result.to_dict())
    if measured.signal is not None:
        raise Interrupted(
            f"Stopped by {name_of(measured.signal)} after "
            f"{plural(measured.rounds, 'complete round')}. "
            f"See the measurements: paralab show {folder.path}",
            exit_code=exit_code_of(measured.signal),
        )
    return result


def with_distinct_names(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Add the options that differ to equal labels; refuse duplicate configurations."""
    requests = [each.request for each in configurations]
    twice = next((each for each in configurations if requests.count(each.request) > 1), None)
    if twice:
        raise UsageError(
            f"The configuration {twice.label!r} is given twice.",
            fix="each one once; the rounds repeat it already",
        )
    if len({request.prefix for request in requests}) > 1:
        raise UsageError(
            "Configurations with different --prefix cannot share their processes.",
            fix="--prefix outside the quotes",
        )

    labels = [each.label for each in configurations]
    silent = [option.name for option in options_of(Request) if option.label is None]
    differing = [name for name in silent if len({getattr(r, name) for r in requests}) > 1]

    def lengthen(each: Configuration) -> Configuration:
        values = {name: getattr(each.request, name) for name in differing}
        words = [f"{flag_of(name)} {value}" for name, value in values.items() if value is not None]
        return replace(each, name=" · ".join([each.label, *words]))

    return [lengthen(each) if labels.count(each.label) > 1 else each for each in configurations]
