"""D06: DataParallel without GPUs does nothing."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.agreement import found as report
from paralab.doctor.agreement import place_of
from paralab.doctor.events import Wrap
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.registry import Entry, check

ENTRY = Entry(
    id="D06",
    title="DataParallel without GPUs does nothing",
    symptom="No message. The model runs as if it were not wrapped.",
    cause="Without CUDA the list of devices is empty, and forward calls the model directly.",
    fix="Check torch.cuda.device_count(); for several CPU processes use DistributedDataParallel with gloo.",
    example="""\
+ if torch.cuda.device_count() < 2:
+     raise SystemExit("DataParallel needs two GPUs or more")
  model = nn.DataParallel(net)
""",
    silent=True,
)


@check("D06", source="ranks")
def no_gpus(seen: Observation) -> Iterator[Finding]:
    """Report a DataParallel without devices."""
    for rank in seen.ranks:
        for wrap in rank.of(Wrap):
            if wrap.kind != "data_parallel" or wrap.model is None or wrap.options.get("device_ids"):
                continue
            yield report(
                "D06",
                "warning",
                f"DataParallel found no GPU: it passes every batch to {wrap.model_class} unchanged, on one CPU process",
                "on CPUs remove DataParallel, or use DistributedDataParallel with gloo and several ranks; on a GPU "
                "machine find out why torch.cuda.is_available() is False",
                place_of(wrap),
                ["device_ids: []", f"GPUs that torch sees: {rank.start.gpus}"],
            )
            return
