"""D03: A batch splits into fewer chunks than there are GPUs.

Symptom: 'Caught TypeError in replica … missing 1 required positional argument', or some GPUs are idle.
Cause: DataParallel rounds the chunk size up: 9 samples on 4 GPUs become 3 + 3 + 3, and the fourth GPU gets none.
Fix: Use a batch size that is a multiple of the number of GPUs, and drop_last=True.
Reported: pytorch/pytorch#15161 #52260 #16432 MIC-DKFZ/nnUNet#677

  model = nn.DataParallel(net, device_ids=[0, 1, 2, 3])
- loader = DataLoader(data, batch_size=9)
+ loader = DataLoader(data, batch_size=8, drop_last=True)
"""

import math

from paralab.doctor.events import Forward, Wrap
from paralab.doctor.failures.data.sizes import drops_last, rows
from paralab.doctor.failures.dataparallel.replicas import gpus_of, pieces
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, Findings, Message, check, describe
from paralab.doctor.static.facts import Call
from paralab.doctor.static.names import DDP, DP, LOADER
from paralab.doctor.static.report import add_keyword, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"Caught TypeError in replica (?P<replica>\d+) on device (?P<device>\d+).*missing \d+ required "
        r"positional argument",
        "Replica {replica} on device {device} got no input{at}: the batch had too few rows for "
        "all GPUs. For example, 9 rows on 4 GPUs become chunks of 3, 3, 3, and nothing.",
    ),
    silent=True,
)


@check("D03", source="script")
def idle_gpus(script: Script) -> Findings:
    """Report a batch size that leaves GPUs idle, in a script with one DataParallel model."""
    wraps = script.calls_of(DP)
    gpus = gpus_of(script, wraps[0]) if len(wraps) == 1 else None
    if gpus is None or gpus < 2 or script.calls_of(DDP):
        return
    for loader in script.calls_of(LOADER):
        given = loader.argument(1, "batch_size")
        size = script.evaluate(given, loader.scope, 0) if given is not None else 1
        if not isinstance(size, int) or size < 1:
            continue
        last = _last_batch(script, loader, size)
        batch = next((one for one in (size, last) if one and pieces(one, gpus) < gpus), None)
        if batch is None:
            continue
        which = f"A batch of {batch}" if batch == size else f"The last batch, {batch} samples,"
        why = (
            f"{which} splits into only {pieces(batch, gpus)} chunks of {math.ceil(batch / gpus)} "
            f"for {gpus} GPUs ({line_of(wraps[0], loader)}). The other GPUs idle, or fail with a "
            "missing argument."
        )
        edits = add_keyword(script, loader, "drop_last=True") if batch != size else ()
        yield found(script, "D03", "warning", loader, why, also=(wraps[0],), edits=edits)


def _last_batch(script: Script, loader: Call, size: int) -> int | None:
    """Return the size of the last batch if it is known and smaller."""
    samples = rows(script, loader.argument(0, "dataset"), loader.scope)
    return None if samples is None or drops_last(script, loader) else samples % size or None


@check_each_rank("D03")
def idle_devices(rank: WatchedRank) -> Finding | None:
    for wrap in rank.of(Wrap):
        devices = len(wrap.options.get("device_ids", []))
        if wrap.kind != "data_parallel" or wrap.model is None or devices < 2:
            continue
        forwards = [one for one in rank.of(Forward) if one.model == wrap.model and one.size]
        short = [one for one in forwards if pieces(one.size or 0, devices) < devices]
        if short:
            size = short[0].size or 0
            count = pieces(size, devices)
            why = (
                f"A batch of {size} on {devices} GPUs splits into {count} chunks of "
                f"{math.ceil(size / devices)}, so {devices - count} GPUs get nothing in "
                f"{len(short)} passes. A forward that takes only keyword arguments fails on them."
            )
            return make_finding("D03", "warning", why, short[0])
    return None
