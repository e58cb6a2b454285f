"""D04: State that forward() sets is lost.

Symptom: No error. Counters and statistics that forward stores on self never change.
Cause: forward runs on replicas that are discarded. Only in-place changes to buffers on the first GPU survive.
Fix: Use DistributedDataParallel, or return the value and update it outside of forward.
Limits: Needs two GPUs, so the doctor checks only the script.
Reported: pytorch/pytorch#1051

  class Net(nn.Module):
      def forward(self, x):
          self.seen = self.seen + len(x)
          return self.layer(x)


- model = nn.DataParallel(Net())
+ model = DistributedDataParallel(Net())
"""

import ast

from paralab.doctor.failures.dataparallel.replicas import classes_in
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.names import DP
from paralab.doctor.static.report import at, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__, silent=True)


@check("D04", source="script")
def state_in_forward(script: Script) -> Findings:
    """Report a counter or running value on self that a replica's forward updates."""
    for wrap in script.calls_of(DP):
        for owner in classes_in(script, wrap):
            forward = script.method(owner, "forward")
            calls = script.calls_in(forward) if forward else []
            own = [
                c.function
                for c in calls
                if c.function and forward and c.function.owner is forward.owner
            ]
            for method in dict.fromkeys([forward, *own] if forward else []):
                for key, definitions in method.definitions.items():
                    for one in definitions if key.startswith("self.") else []:
                        if one.value is None or not _accumulates(one.value, key):
                            continue
                        where = at(one.node, method)
                        why = (
                            f"forward updates `{key}`, but DataParallel ({line_of(wrap, where)}) "
                            "runs forward on replicas, which it discards after the pass together "
                            "with the update."
                        )
                        yield found(script, "D04", "error", where, why, also=(wrap,))


def _accumulates(value: ast.expr, key: str) -> bool:
    """Return whether a new value is computed from the old one, and not only converted, as in
    `self.mask = self.mask.to(device).view(-1)`."""
    if not any(dotted_key(part) == key for part in ast.walk(value)):
        return False
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return dotted_key(value) != key
