"""S04: find_unused_parameters=True, but every parameter is used.

Symptom: 'find_unused_parameters=True was specified … but did not find any unused parameters', and slower steps.
Cause: In every step, DDP searches the autograd graph for unused parameters, although there are none.
Fix: Remove find_unused_parameters, unless some later batch skips part of the model.
Reported: ecmwf/WeatherGenerator#1280

- model = DistributedDataParallel(model, find_unused_parameters=True)
+ model = DistributedDataParallel(model)
"""

from paralab.doctor.events import Backward
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import ddp_wraps, is_data_parallel, make_finding
from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, Findings, check, describe, printed

ENTRY = describe(
    __doc__,
    printed(
        r"find_unused_parameters=True was specified in DDP constructor, but did not find any unused",
        "DDP searches the whole graph for unused parameters in every step and found none.",
        severity="warning",
    ),
)
FEWEST_PASSES = 4  # DDP reports its result one pass later


@check("S04", source="ranks")
def needless_search(seen: Observation) -> Findings:
    for wrap in ddp_wraps(seen.ranks[0]) if is_data_parallel(seen) else ():
        if not wrap.options.get("find_unused_parameters") or wrap.options.get("static_graph"):
            continue
        key = str(wrap.model)
        passes = [[e for e in r.of(Backward) if key in (e.unused_bytes or {})] for r in seen.ranks]
        unused = any(
            (event.unused_bytes or {}).get(key) or (event.lacking or {}).get(key)
            for events in passes
            for event in events
        )
        if unused or min(map(len, passes)) < FEWEST_PASSES:
            continue
        why = (
            f"find_unused_parameters=True makes DDP walk the graph of {wrap.model_class} after every "
            f"forward, but {len(passes[0])} observed passes used all {sum(wrap.trainable)} trainable "
            "parameters on every rank."
        )
        yield make_finding("S04", "warning", why, wrap)


@check_each_run("S04")
def needless_search_in_run(run: Run) -> Finding | None:
    if not run.plan.find_unused or run.recording.manifest.workload.unused:
        return None
    why = "DDP walks the graph after every forward pass, but every parameter was used."
    return Finding("S04", "warning", why)
