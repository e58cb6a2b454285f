"""W04: Low precision is slower than fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paralab.analyse.compare import Row
from paralab.analyse.confidence import Ratio, speed_up
from paralab.analyse.metrics import RULE
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import Entry, check
from paralab.plan.request import Request

ENTRY = Entry(
    id="W04",
    title="Low precision is slower than fp32",
    symptom="autocast makes the step longer.",
    cause="The device has no fast units for that precision (many CPUs), or the matrices are so small that the casts cost more than they save.",
    fix="Measure both, and use fp32 where it is faster.",
    example="""\
- with torch.autocast("cpu", dtype=torch.bfloat16):
-     loss = model(batch).mean()
+ loss = model(batch).mean()
""",
)
LOW = ("bf16", "fp16")


def judge_precision(precision: str, ratio: Ratio, device: str) -> Finding | None:
    """Report slow low precision. `ratio`: the speed-up over the same configuration in fp32."""
    sure = ratio.verdict == "slower"
    if not sure and (ratio.low is not None or ratio.value > 1 - RULE):
        return None
    interval = "" if ratio.low is None else f" ({ratio.low:.2f}–{ratio.high:.2f})"
    why = (
        f"{precision} is {ratio.value:.2f}× as fast as fp32{interval} on {device}: the casts cost "
        "more than they save."
    )
    if not sure:
        why += " Measured once. Certain after three rounds (paralab compare --rounds 3)."
    fix = (
        f"Use fp32 on this device, unless you need {precision} to save memory. On a GPU, larger "
        "matrices in multiples of 8 help."
    )
    severity: Severity = "warning" if sure else "suspect"
    evidence = (f"speed-up {ratio.value:.2f}",)
    return Finding("W04", severity, why, fix, gain=1 - ratio.value, evidence=evidence)


@check("W04", source="run")
def slower_precision(recorded: Recorded) -> Iterator[Finding]:
    """Report slow precisions in a comparison, which has the same training in both precisions."""
    for row in recorded.rows:
        plain = next((other for other in recorded.rows if _is_fp32_twin(other, row)), None)
        if row.precision in LOW and plain:
            ratio = speed_up(plain.round_seconds_per_sample, row.round_seconds_per_sample)
            run = next(run for run in recorded.runs if run.name == row.name)
            machine = run.recording.manifest.machine
            device = machine.gpus[0].name if run.plan.device == "cuda" else machine.cpu
            yield from run.report(judge_precision(row.precision, ratio, device))


def _is_fp32_twin(other: Row, row: Row) -> bool:
    return other.precision == "fp32" and _without_precision(other) == _without_precision(row)


def _without_precision(row: Row) -> Request:
    return replace(row.request, precision=None, loss_scale=None)
