"""`paralab compare`: strategies on one model at one global batch, side by side, each proved to be the same training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paralab.analyse.comparison import comparison_of
from paralab.errors import UsageError
from paralab.experiment import ROUNDS, STEPS, Case, measure, resolve_all
from paralab.plan.request import Request, only_applicable
from paralab.record.folder import RunFolder
from paralab.training import slug


def default_cases(base: Request) -> list[Case]:
    """The strategies that everybody should see once, with two replicas and two stages, and every low precision that runs here."""
    ddp = replace(base, strategy="ddp")
    cases = [
        Case(replace(base, strategy="single")),
        Case(replace(base, strategy="dp")),
        Case(ddp),
        Case(replace(ddp, accumulate=4)),
        Case(replace(base, strategy="pipeline")),
        Case(replace(base, strategy="hybrid")),
    ]
    low = [Case(replace(ddp, precision=precision), optional=True) for precision in ("tf32", "bf16")]
    both = [Case(replace(ddp, precision="bf16", accumulate=4), optional=True)]
    return cases[:4] + low + both + cases[4:]


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
    rounds = rounds or ROUNDS
    steps = steps or STEPS
    cases = [replace(case, request=only_applicable(replace(case.request, steps=case.request.steps or steps))) for case in cases]
    labels = [case.label for case in cases]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice:
        raise UsageError(f"The set-up {twice!r} is given twice.", cure="each one once; the rounds repeat it already")
    resolved, left_out = resolve_all(cases)
    folder = RunFolder.create(out, f"{kind}_{slug(resolved[0].summary.name)}")
    measured = measure(folder, resolved, rounds, prove, say)
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
