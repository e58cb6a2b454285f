"""H17: The process group is never destroyed, or only one rank destroys it.

Symptom: 'destroy_process_group() was not called before program exit', or the job hangs at exit.
Cause: The script never calls destroy_process_group, or only some ranks reach the call.
Fix: Call it on every rank when training ends, preferably in a `finally` block.
Limits: Only NCCL prints the warning. gloo exits quietly.
Reported: pytorch/pytorch#75097 #126275 #122358

  train(model, loader)
- if dist.get_rank() == 0:
-     dist.destroy_process_group()
+ dist.destroy_process_group()
"""

import re

from paralab.doctor.events import Destroy, Init
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Findings, check, describe, note
from paralab.doctor.static import report
from paralab.doctor.static.facts import If
from paralab.doctor.static.names import INIT
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    note(
        r"destroy_process_group\(\) was not called before program exit",
        "{who} exited without destroy_process_group(). The run itself succeeded.",
        severity="warning",
    ),
)


@check("H17", source="ranks")
def group_not_destroyed(seen: Observation) -> Findings:
    if not seen.over or seen.ended_by_us or seen.exit_code != 0:
        return
    inits = [(rank, init) for rank in seen.ranks if (init := rank.last(Init)) is not None]
    made = [(rank, init) for rank, init in inits if not init.error and not rank.is_blind]
    without = [(r, init) for r, init in made if r.reached_end and not (r.raised or r.of(Destroy))]
    for rank, init in without[:1]:
        some = len(without) < len(made)
        who = f"Rank {rank.rank} never called" if some else "No rank called"
        why = (
            f"{who} destroy_process_group() after this. Exiting interrupts communication that is "
            "still in flight, so NCCL may warn or hang."
        )
        yield make_finding("H17", "warning", why, init, rank=rank.rank if some else None)


def _is_unused(script: Script, scope: Scope) -> bool:
    """Return whether a function such as `cleanup` is defined, but never mentioned again."""
    word = re.compile(rf"\b{re.escape(scope.name)}\b")
    return scope.is_function and sum(len(word.findall(one.text)) for one in script.modules) == 1


CLOSES_GROUPS = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "ignite", "ray")


@check("H17", source="script")
def nobody_destroys_the_group(script: Script) -> Findings:
    """Flag a missing destroy_process_group. Most scripts exit cleanly without it."""
    starts, ends = script.calls_of(INIT), script.methods("destroy_process_group")
    named = any("destroy_process_group" in module.text for module in script.modules)
    named = named and not (ends and all(_is_unused(script, call.scope) for call in ends))
    if not starts or script.imports(*CLOSES_GROUPS):
        return
    if not named:
        why = "Nothing in the project destroys this process group. torch warns at exit, and NCCL may hang."
        yield report.found(script, "H17", "suspect", starts[0], why)
    guards = [
        next((one for one in call.inside(If) if script.differs(one.test, call.scope)), None)
        for call in ends
    ]
    if ends and len(ends) == 1 and guards[0] is not None and not guards[0].exits:
        why = f"Only some ranks destroy the process group (`{report.code(guards[0].test)}`), so NCCL may hang at exit."
        yield report.found(script, "H17", "suspect", ends[0], why)
