"""nn.DataParallel: batches that do not fill all devices, and no devices at all."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paralab.doctor.agreement import found, place_of
from paralab.doctor.events import Forward, Wrap
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.registry import check


def chunks(batch: int, devices: int) -> int:
    """Parts that scatter makes of a batch, all of the same size but the last: 9 over 4 devices are
    3 3 3."""
    return math.ceil(batch / math.ceil(batch / devices)) if batch else 0


@check("D03", source="ranks")
def idle_devices(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        for wrap in (
            wrap
            for wrap in rank.of(Wrap)
            if wrap.kind == "data_parallel" and wrap.model is not None
        ):
            devices = len(wrap.options.get("device_ids", []))
            bad = [
                f
                for f in rank.of(Forward)
                if f.model == wrap.model
                and f.size
                and devices > 1
                and chunks(f.size, devices) < devices
            ]
            if bad:
                size = bad[0].size or 0
                yield found(
                    "D03",
                    "warning",
                    f"a batch of {size} over {devices} GPUs is cut into {chunks(size, devices)} parts of "
                    f"{math.ceil(size / devices)}: "
                    f"{devices - chunks(size, devices)} GPUs get nothing in {len(bad)} passes, and a forward with keyword "
                    "arguments only "
                    "fails on them",
                    f"a batch size that is a multiple of {devices}, and drop_last=True",
                    place_of(bad[0]),
                    [f"sizes of batches: {sorted({f.size for f in bad if f.size})[:5]}"],
                )
                return


@check("D06", source="ranks")
def no_devices(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        for wrap in rank.of(Wrap):
            if (
                wrap.kind == "data_parallel"
                and wrap.model is not None
                and not wrap.options.get("device_ids")
            ):
                yield found(
                    "D06",
                    "warning",
                    f"DataParallel found no GPU: it hands every batch to {wrap.model_class} as it is, on one CPU process, "
                    "without a word",
                    "on CPUs leave DataParallel out, or use DistributedDataParallel with gloo and several ranks; on a GPU "
                    "machine find out "
                    "why torch.cuda.is_available() is False",
                    place_of(wrap),
                    ["device_ids: []", f"GPUs that torch sees: {rank.start.gpus}"],
                )
                return
