"""W04: Low precision is slower than fp32.

Symptom: Steps take longer with autocast.
Cause: The device has no fast units for that precision (many CPUs), or the matrices are so small
that the casts cost more than they save.
Fix: Use fp32 on this device, unless you need the memory. On a GPU, larger matrices in multiples of 8 help.

- with torch.autocast("cpu", dtype=torch.bfloat16):
-     loss = model(batch).mean()
+ loss = model(batch).mean()
"""

from dataclasses import replace

from paralab.analyse.compare import Row
from paralab.analyse.confidence import SpeedUp, speed_up
from paralab.analyse.metrics import RULE
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.plan.request import Request

ENTRY = describe(__doc__)
LOW = ("bf16", "fp16")


def judge_precision(precision: str, ratio: SpeedUp, device: str) -> Finding | None:
    """Report slow low precision. `ratio` is the speed-up over the same configuration in fp32."""
    sure = ratio.verdict == "slower"
    if not sure and (ratio.low is not None or ratio.value > 1 - RULE):
        return None
    interval = "" if ratio.low is None else f" ({ratio.low:.2f}–{ratio.high:.2f})"
    why = (
        f"{precision} is {ratio.value:.2f}× as fast as fp32{interval} on {device}: the casts cost more "
        "than they save."
    )
    doubt = "" if sure else "after three rounds (paralab compare --rounds 3)"
    return make_finding("W04", "warning", why, None, doubt=doubt, gain=1 - ratio.value)


@check("W04", source="run")
def slower_precision(recorded: Recorded) -> Findings:
    for row in recorded.rows:
        plain = next((other for other in recorded.rows if _is_fp32_twin(other, row)), None)
        if row.precision in LOW and plain:
            ratio = speed_up(plain.round_seconds_per_sample, row.round_seconds_per_sample)
            run = next(run for run in recorded.runs if run.name == row.name)
            machine = run.recording.manifest.machine
            device = machine.gpus[0].name if run.plan.device == "cuda" else machine.cpu
            if finding := judge_precision(row.precision, ratio, device):
                yield replace(finding, file=str(run.folder))


def _is_fp32_twin(other: Row, row: Row) -> bool:
    return other.precision == "fp32" and _without_precision(other) == _without_precision(row)


def _without_precision(row: Row) -> Request:
    return replace(row.request, precision=None, loss_scale=None)
