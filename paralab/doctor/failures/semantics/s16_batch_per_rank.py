"""S16: Each rank uses the global batch size.

Symptom: Out of memory, or a global batch that is N times too large with N ranks.
Cause: `batch_size` is the number of samples per rank, but the script passes the number for all ranks.
Fix: Divide the batch size by the world size: `batch_size=global_batch // dist.get_world_size()`.
Limits: Only a name (global_batch, total_batch) shows what was intended, so this is always a suspect.

  GLOBAL_BATCH = 256
- loader = DataLoader(data, batch_size=GLOBAL_BATCH, sampler=DistributedSampler(data))
+ loader = DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=DistributedSampler(data))
"""

from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.models import wraps
from paralab.doctor.static.names import LOADER
from paralab.doctor.static.report import code, found
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__)
_GLOBAL = ("global_batch", "total_batch", "effective_batch")


@check("S16", source="script")
def global_batch_on_every_rank(script: Script) -> Findings:
    """Report a loader with a DistributedSampler whose batch size is named after the global batch."""
    for call in script.calls_of(LOADER) if wraps(script) else ():
        size = call.argument(1, "batch_size")
        name = (dotted_key(size) or "").rpartition(".")[2].lower() if size is not None else ""
        sampler = call.argument(99, "sampler")
        if size is None or not name.startswith(_GLOBAL):
            continue
        if not script.is_kind(sampler, call.scope, "distributed sampler") or any(
            one.value is not None and "world" in code(one.value, 200).lower()
            for one in script.reaching(size, call.scope)
        ):
            continue
        why = f"Every rank loads `{code(size)}` samples per step, although the name says that this is the batch size of all ranks together."
        yield found(script, "S16", "suspect", call, why, doubt="if the name is right")
