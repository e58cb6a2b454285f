"""D02: GPU 0 fills up first.

Symptom: GPU 0 runs out of memory while the others have room.
Cause: GPU 0 gathers all outputs and holds the parameters, gradients, and optimizer state.
Fix: Use DistributedDataParallel, or compute the loss inside forward so that only one number per GPU is gathered.
Limits: Needs GPUs that report their memory use.

- model = nn.DataParallel(net)
- loss = criterion(model(x), y)
+ model = nn.DataParallel(WithLoss(net, criterion))
+ loss = model(x, y).mean()
"""

from collections.abc import Sequence

from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, describe
from paralab.units import seconds, size

ENTRY = describe(__doc__)
IMBALANCE = 1.3  # ratio of device 0 to the mean of the others


@check_each_run("D02")
def unequal_replicas(run: Run) -> Finding | None:
    if run.plan.strategy != "dp":
        return None
    devices = run.metrics.busy if run.metrics.balance else ()
    busy = [device.seconds or 0.0 for device in devices]
    peaks = [memory.bytes for memory in run.result.peak_bytes]
    return judge_replicas(busy, peaks, run.step_seconds)


def judge_replicas(busy: Sequence[float], peaks: Sequence[int], step: float) -> Finding | None:
    """Report device 0 if it computes longer or uses more memory than the others. `busy` is the
    seconds per step and `peaks` the peak bytes of each device."""
    time, memory = _against_others(busy), _against_others(peaks)
    parts = []
    if time >= IMBALANCE:
        parts.append(f"computes {seconds(busy[0])} per step, {time:.2f}× as long as the others")
    if memory >= IMBALANCE:
        parts.append(f"uses {size(peaks[0])}, {memory:.2f}× as much as the others")
    if not parts:
        return None
    why = f"DataParallel: device 0 {' and '.join(parts)}, because it holds the outputs and the optimizer."
    mean = sum(busy[1:]) / len(busy[1:]) if busy[1:] else 0.0
    gain = (busy[0] - mean) / step if time >= IMBALANCE and step else None
    return Finding("D02", "warning", why, gain=gain)


def _against_others(values: Sequence[float]) -> float:
    others = values[1:]
    return values[0] * len(others) / sum(others) if others and sum(others) else 1.0
