"""C02: strict=False loads nothing.

Symptom: No error. Training continues from random weights.
Cause: All names differ by the prefix 'module.', so none matches. strict=False ignores that, and nothing checks the result.
Fix: Save `model.module.state_dict()` or remove the prefix. Load strictly, or check what load_state_dict returns.
Reported: pytorch/examples#1029

  state = torch.load("net.pt", map_location="cpu")
- net.load_state_dict(state, strict=False)
+ net.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
"""

import ast

from paralab.doctor.events import LoadState
from paralab.doctor.failures.checkpoints.c01_module_prefix import only_prefix_differs
from paralab.doctor.failures.checkpoints.files import (
    loads_of_files,
    same_file,
    strips_prefix,
    wrapper_saves,
)
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, listed, make_finding
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.doctor.static.facts import is_constant
from paralab.doctor.static.names import DDP
from paralab.doctor.static.report import found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__, silent=True)


@check("C02", source="script")
def mismatch_ignored(script: Script) -> Findings:
    """Report a load with strict=False whose result is ignored. It is an error if the file holds a
    wrapper's state."""
    if not script.calls_of(DDP) or strips_prefix(script):
        return
    saves = wrapper_saves(script)
    for call, load in loads_of_files(script):
        kinds = script.kinds(call.receiver, call.scope)
        if not is_constant(call.argument(1, "strict"), False) or "ddp" in kinds:
            continue
        if not isinstance(call.module.parents.get(call.node), ast.Expr):
            continue  # something checks the result
        save = next((one for one, _ in saves if same_file(one, load)), None)
        if save is not None and kinds == {"module"}:
            why = (
                f"The file contains the state of the DDP wrapper ({line_of(save, call)}), whose "
                "names all begin "
                "with `module.`. strict=False accepts that and loads nothing, so the weights stay random."
            )
            yield found(script, "C02", "error", call, why, also=(save,))
        else:
            why = "strict=False skips names that do not match, and nothing checks the result."
            doubt = "if the file was saved from a DDP model, because then no name matches"
            yield found(script, "C02", "suspect", call, why, doubt=doubt)


@check_each_rank("C02")
def nothing_loaded(rank: WatchedRank) -> Finding | None:
    for load in rank.of(LoadState):
        if load.strict or load.error or load.matched or not load.total or not load.unexpected:
            continue
        cause = " (only DDP's prefix 'module.' differs)" if only_prefix_differs(load) else ""
        why = (
            f"strict=False accepted a state with none of the {load.total} names of "
            f"{load.model_class}{cause}. Nothing was loaded, and the weights stay random."
        )
        names = f"missing {listed(load.missing, 3)}; unexpected {listed(load.unexpected, 3)}"
        return make_finding("C02", "error", why, load, f"rank {rank.rank}: {names}")
    return None
