"""`paralab compare`: strategies on one model at one global batch, side by side, each proved to be
the same training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields

from paralab.analyse.compare import Comparison, comparison_of
from paralab.analyse.manifest import About
from paralab.errors import Interrupted, UsageError, unknown
from paralab.experiment.planning import look_once, slug
from paralab.experiment.rounds import BUDGET_SECONDS, ROUNDS, Case, measure, planned, resolve_all
from paralab.machine.signals import exit_code_of, name_of
from paralab.plan.option import flag_of, options_of
from paralab.plan.request import APPLIES, STRATEGIES, Request, only_applicable
from paralab.plan.resolve import needs_layers
from paralab.plan.sharding import needs_units
from paralab.record.folder import RunFolder
from paralab.units import plural
from paralab.workload.reference import check_reference


def default_cases(base: Request) -> list[Case]:
    """The strategies that everybody should see once, with two replicas and two stages, and every
    low precision that this machine has instructions for."""
    machine, _ = look_once(check_reference(base.workload), base.device, True, base.batch_size, 1)
    on_gpu = bool(machine.gpus) and base.device != "cpu"
    low = ("tf32", "bf16", "fp16") if on_gpu else ("bf16",)
    asked: list[dict[str, Any]] = [
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
        Case(with_common(base, setup), optional=number > 3) for number, setup in enumerate(asked)
    ]


def with_common(base: Request, own: dict[str, Any]) -> Request:
    """A set-up with its own options, and those common ones that mean something for its strategy."""
    known = [field.name for field in fields(Request)]
    for name in own:
        if name not in known:
            raise unknown("option", name, known)
    strategy = own.get("strategy")
    if not isinstance(strategy, str):
        raise UsageError(
            f"The set-up {own} names no strategy.", fix='{"strategy": "ddp", "replicas": 2}'
        )
    return replace(
        only_applicable(replace(base, strategy=strategy))
        if strategy in STRATEGIES
        else Request(strategy),
        **own,
    )


def scale_cases(base: Request, counts: str, weak: bool) -> list[Case]:
    """The strategy with 1, 2, 4 … replicas; weak: with as many times the batch."""
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
    asked = (needs_layers(base.strategy), base.batch_size, 1, needs_units(base.strategy))
    _, summary = look_once(check_reference(base.workload), base.device, *asked)
    batch = base.batch_size or summary.batch_size
    return [
        Case(replace(base, replicas=n, batch_size=batch * n // numbers[0] if weak else batch))
        for n in numbers
    ]


def compare(
    cases: Sequence[Case],
    *,
    kind: str = "compare",
    about: About | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    prove: bool = True,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Measure the cases; return the comparison, which is computed from the folder that they
    leave."""
    started = time.perf_counter()
    if rounds is not None and rounds < 1:
        raise UsageError(
            f"{rounds} rounds measure nothing.", fix="at least 1 round, and 3 for an interval"
        )
    if steps is not None:
        cases = [
            replace(case, request=replace(case.request, steps=case.request.steps or steps))
            for case in cases
        ]
    cases = _told_apart(cases)
    workloads = list(dict.fromkeys(case.request.workload for case in cases))
    if kind == "compare" and len(workloads) > 1:
        named = ", ".join(workloads)
        raise UsageError(
            f"Different workloads cannot be compared: {named}.",
            fix="--workload once, outside the quotes",
        )
    resolved, left_out = resolve_all(cases)
    folder = RunFolder.create(out, f"{kind}_{slug(resolved[0].summary.name)}")
    entries = planned(resolved, rounds or ROUNDS)
    folder.write_manifest(
        kind=kind,
        about=(about or About()).to_dict(),
        machine=asdict(resolved[0].machine),
        workload=asdict(resolved[0].summary),
        left_out=[each.to_dict() for each in left_out],
        configurations=[entry.to_dict() for entry in entries],
    )
    measured = measure(folder, resolved, entries, prove, say, None if rounds else BUDGET_SECONDS)
    folder.write_outcome(measured.to_dict())
    seconds = round(time.perf_counter() - started, 3)
    result = replace_fields(comparison_of(folder.path), seconds=seconds)
    folder.write_result(result.to_dict())
    if measured.signal is not None:
        rounds_done = plural(measured.rounds, "whole round")
        raise Interrupted(
            f"Stopped by {name_of(measured.signal)} after {rounds_done}. What was measured is kept: paralab show {folder.path}",
            exit_code=exit_code_of(measured.signal),
        )
    return result


def _told_apart(cases: Sequence[Case]) -> list[Case]:
    """Names that differ where the set-ups do."""
    if len({case.request for case in cases}) < len(cases):
        requests = [case.request for case in cases]
        twice = next(case for case in cases if requests.count(case.request) > 1)
        raise UsageError(
            f"The set-up {twice.label!r} is given twice.",
            fix="each one once; the rounds repeat it already",
        )
    if len({case.request.prefix for case in cases}) > 1:
        raise UsageError(
            "Set-ups with different --prefix cannot share their processes.",
            fix="--prefix outside the quotes",
        )
    labels = [case.label for case in cases]
    silent = [option.name for option in options_of(Request) if option.label is None]
    options = [name for name in silent if len({getattr(case.request, name) for case in cases}) > 1]

    def longer(case: Case) -> str:
        said = [
            f"{flag_of(name)} {getattr(case.request, name)}"
            for name in options
            if getattr(case.request, name) is not None
        ]
        return " · ".join([case.label, *said])

    return [
        replace(case, name=longer(case)) if labels.count(case.label) > 1 else case for case in cases
    ]
