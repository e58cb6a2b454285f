"""D06: DataParallel without GPUs does nothing.

Symptom: No error. The model runs as if it were not wrapped.
Cause: Without CUDA, the list of devices is empty, and forward calls the model directly.
Fix: Check torch.cuda.device_count(). For several CPU processes, use DistributedDataParallel with gloo.

+ if torch.cuda.device_count() < 2:
+     raise SystemExit("DataParallel needs two GPUs or more")
  model = nn.DataParallel(net)
"""

from paralab.doctor.events import Wrap
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, describe

ENTRY = describe(__doc__, silent=True)


@check_each_rank("D06")
def no_gpus(rank: WatchedRank) -> Finding | None:
    for wrap in rank.of(Wrap):
        empty = wrap.model is not None and not wrap.options.get("device_ids")
        if wrap.kind == "data_parallel" and empty:
            why = f"DataParallel found no GPU and passes batches to {wrap.model_class} unchanged."
            return make_finding("D06", "warning", why, wrap)
    return None
