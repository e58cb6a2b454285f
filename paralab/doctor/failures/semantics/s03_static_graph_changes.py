"""S03: The graph changes although static_graph=True.

Symptom: 'your training graph has changed in this iteration … not compatible with static_graph set to True'.
Cause: static_graph=True promises that every step uses the same parameters. A branch on the data breaks that promise.
Fix: Drop static_graph, and pass find_unused_parameters=True if some passes skip parameters. Or remove the branch.
Reported: pytorch/pytorch#97030 #79171

- model = DistributedDataParallel(model, static_graph=True)
+ model = DistributedDataParallel(model, find_unused_parameters=True)
  for step, x in enumerate(loader):
      model(x, with_head=step % 2 == 0).sum().backward()
"""

from functools import lru_cache

from paralab.doctor.events import Backward
from paralab.doctor.failures.semantics.s01_unused_parameters import UNFINISHED
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import ddp_wraps, listed, make_finding
from paralab.doctor.registry import Finding, Message, check, describe

ENTRY = describe(
    __doc__,
    Message(
        r"training graph has changed in this iteration",
        "{who} took a different path through the model than in its first step{at}, although "
        "static_graph=True promises that the graph never changes.",
    ),
)
CHANGED = "training graph has changed in this iteration"


@check("S03", source="ranks")
@lru_cache(maxsize=1)
def find_changed_graph(seen: Observation) -> Finding | None:
    """Explain DDP's exception: which parameters the first pass did not use."""
    for rank in seen.ranks:
        wrap = next((wrap for wrap in ddp_wraps(rank) if wrap.options.get("static_graph")), None)
        message = rank.raised.message if rank.raised else ""
        if wrap is None or rank.raised is None or not (CHANGED in message or UNFINISHED in message):
            continue
        passes = rank.of(Backward)
        first = next((event.lacking for event in passes if event.lacking is not None), {})
        names = first.get(str(wrap.model), [])
        unused = f" ({listed(names)} had no gradient in the first pass)" if names else ""
        why = (
            f"Pass {len(passes)} used different parameters than the first one{unused}, although "
            "static_graph=True promises that every pass uses the same ones."
        )
        evidence = f"rank {rank.rank}, {rank.raised.place}: {message.splitlines()[0][:160]}"
        return make_finding("S03", "error", why, wrap, evidence)
    return None
