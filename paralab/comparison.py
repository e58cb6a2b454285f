"""`paralab compare`: strategies on one model at one global batch, side by side, each proved to be the same training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paralab.analyse.comparison import comparison_of
from paralab.errors import UsageError
from paralab.experiment import BUDGET_SECONDS, ROUNDS, Case, measure, resolve_all
from paralab.plan.request import APPLIES, Request, only_applicable
from paralab.record.folder import RunFolder
from paralab.training import look_once, slug
from paralab.workload.reference import check_reference


def default_cases(base: Request) -> list[Case]:
    """The strategies that everybody should see once, with two replicas and two stages, and every low precision that this machine
    has instructions for."""
    machine, _ = look_once(check_reference(base.workload), base.device, True, base.batch_size, 1)
    on_gpu = bool(machine.gpus) and base.device != "cpu"
    ddp = replace(base, strategy="ddp")
    low = ("tf32", "bf16", "fp16") if on_gpu else ("bf16",)
    return [
        Case(replace(base, strategy="single")),
        Case(replace(base, strategy="dp")),
        Case(ddp),
        Case(replace(ddp, accumulate=4)),
        *(Case(replace(ddp, precision=precision), optional=True) for precision in low),
        Case(replace(ddp, precision="bf16", accumulate=4), optional=True),
        Case(replace(base, strategy="pipeline"), optional=True),
        Case(replace(base, strategy="hybrid"), optional=True),
    ]


def scale_cases(base: Request, counts: str, weak: bool) -> list[Case]:
    """The strategy with 1, 2, 4 … replicas; weak: with as many times the batch."""
    try:
        numbers = sorted({int(word) for word in counts.split(",")})
    except ValueError:
        raise UsageError(f"--replicas {counts}: not a list of numbers.", cure="--replicas 1,2,4") from None
    if base.strategy not in APPLIES["replicas"]:
        raise UsageError(f"{base.strategy} has no replicas to scale.", cure="one of: " + ", ".join(APPLIES["replicas"]))
    if len(numbers) < 2 or numbers[0] < 1:
        raise UsageError(f"--replicas {counts}: scaling needs at least two different positive numbers.", cure="--replicas 1,2,4")
    _, summary = look_once(check_reference(base.workload), base.device, base.strategy == "hybrid", base.batch_size, 1)
    batch = base.batch_size or summary.batch_size
    return [Case(replace(base, replicas=n, batch_size=batch * n // numbers[0] if weak else batch)) for n in numbers]


def compare(
    cases: Sequence[Case],
    *,
    kind: str = "compare",
    about: dict[str, Any] | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    prove: bool = True,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure the cases; return the comparison, which is computed from the folder that they leave."""
    started = time.perf_counter()
    cases = [replace(case, request=only_applicable(replace(case.request, steps=case.request.steps or steps))) for case in cases]
    labels = [case.label for case in cases]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice:
        raise UsageError(f"The set-up {twice!r} is given twice.", cure="each one once; the rounds repeat it already")
    resolved, left_out = resolve_all(cases)
    folder = RunFolder.create(out, f"{kind}_{slug(resolved[0].summary.name)}")
    measured = measure(folder, resolved, rounds or ROUNDS, prove, say, None if rounds else BUDGET_SECONDS)
    folder.write_manifest(
        kind=kind,
        about=about or {},
        machine=asdict(resolved[0].machine),
        workload=asdict(resolved[0].summary),
        left_out=left_out,
        **measured,
    )
    result = comparison_of(folder.path) | {"seconds": round(time.perf_counter() - started, 3)}
    folder.write_result(result)
    return result
