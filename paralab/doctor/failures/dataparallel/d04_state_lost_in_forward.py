"""D04: state that forward sets is lost."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.failures.dataparallel.replicas import classes_in
from paralab.doctor.finding import Finding
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.names import DP
from paralab.doctor.static.project import Scope, dotted_key
from paralab.doctor.static.report import at, found, line_of
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="D04",
    title="State that forward sets is lost",
    symptom="No message. Counters and statistics that forward updates on self never change.",
    cause="forward runs on replicas that are discarded. Only in-place changes of buffers on the first GPU survive.",
    fix="Use DistributedDataParallel, or return the value and update it outside.",
    example="""\
  class Net(nn.Module):
      def forward(self, x):
          self.seen = self.seen + len(x)
          return self.layer(x)


- model = nn.DataParallel(Net())
+ model = DistributedDataParallel(Net())
""",
    sources=("pytorch/pytorch#1051",),
    silent=True,
    limits="Needs two GPUs, so only the script is checked.",
)


@check("D04", source="script")
def state_in_forward(script: Script) -> Iterator[Finding]:
    """Report a counter or running value on self that the forward of a replica updates."""
    for wrap in script.calls_of(DP):
        for owner in classes_in(script, wrap):
            for method in _run_by_forward(script, owner):
                for key, definitions in method.definitions.items():
                    for one in definitions if key.startswith("self.") else []:
                        if one.value is None or not _uses(one.value, key):
                            continue
                        where = at(one.node, method)
                        why = (
                            f"`{key}` is updated in the forward of a model in DataParallel ({line_of(wrap, where)}). Each "
                            "GPU runs a replica that is discarded after forward, together with the update."
                        )
                        fix = "Return the value and update it outside, or use DistributedDataParallel."
                        yield found(script, "D04", "error", where, why, fix, also=(wrap,))


def _run_by_forward(script: Script, owner: Scope) -> list[Scope]:
    """Return `forward` and the methods of the class that it calls."""
    forward = script.method(owner, "forward")
    if forward is None:
        return []
    called = [call.function for call in script.calls_in(forward) if call.function is not None]
    return list(dict.fromkeys([forward, *(one for one in called if one.owner is forward.owner)]))


def _uses(value: ast.expr, key: str) -> bool:
    return any(dotted_key(node) == key for node in ast.walk(value))
