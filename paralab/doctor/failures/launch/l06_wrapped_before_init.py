"""L06: DDP or the sampler is created before the process group.

Symptom: 'Default process group has not been initialized, please make sure to call init_process_group'.
Cause: DistributedDataParallel and DistributedSampler need the process group, which does not exist yet.
Fix: Call init_process_group first.

+ dist.init_process_group("gloo")
  sampler = DistributedSampler(data)
- dist.init_process_group("gloo")
"""

import ast
import re

from paralab.doctor.failures.semantics.order import runs_after
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.names import COLLECTIVES, DDP, INIT, SAMPLER
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"(?:Default )?process group (?:has not been|is not) initialized",
        "{who} used the process group{at} before init_process_group was called.",
    ),
)


_NEED_GROUP = (
    DDP,
    SAMPLER,
    *(f"torch.distributed.{name}" for name in ("get_rank", "get_world_size", *sorted(COLLECTIVES))),
)
_ASKS_FOR_GROUP = re.compile(r"init|avail|distributed|ddp|rank", re.I)


@check("L06", source="script")
def before_the_group(script: Script) -> Findings:
    """Report a call that needs the process group but always runs before the only init."""
    starts = script.calls_of(INIT)
    if len(starts) != 1:
        return
    for call in script.calls_of(*_NEED_GROUP):
        later = starts[0]
        if not _comes_first(script, call, later) or _is_guarded(call):
            continue
        if call.target == SAMPLER and call.argument(1, "num_replicas") and call.argument(2, "rank"):
            continue
        why = (
            f"`{code(call.node.func)}` needs the process group, but runs before `{code(later.node.func)}` "
            f"({line_of(later, call)}), and raises."
        )
        yield found(script, "L06", "error", call, why, also=(later,))
        return


def _comes_first(script: Script, call: Call, init: Call) -> bool:
    """Return whether a call always runs before the init, or on import."""
    order = runs_after(script, (init.node, init.scope), (call.node, call.scope))
    if order:
        return order == {"after"}
    top = call.scope.parent is None and call.module is not script.modules[0]
    return top and init.scope.is_function and init.module is script.modules[0]


def _is_guarded(call: Call) -> bool:
    """Return whether a call is in a try block, or under a condition that may check the group."""
    node: ast.AST | None = call.node
    while node is not None and node is not call.scope.node:
        if isinstance(node, ast.Try):
            return True
        node = call.module.parents.get(node)
    return any(_ASKS_FOR_GROUP.search(code(one.test, 200)) for one in call.inside(If))
