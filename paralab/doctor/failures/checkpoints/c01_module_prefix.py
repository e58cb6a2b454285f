"""C01: The keys of a saved state_dict begin with 'module.'.

Symptom: 'Missing key(s) in state_dict: "0.weight" … Unexpected key(s): "module.0.weight"'.
Cause: The checkpoint contains the state of the DDP wrapper, which prefixes every name with 'module.'.
Fix: Save `model.module.state_dict()`.
Reported: pytorch/pytorch#3805 menzelab/implicit-shape-reconstruction#2 facebookresearch/fairchem#76

  model = DistributedDataParallel(net)
- torch.save(model.state_dict(), "net.pt")
+ torch.save(model.module.state_dict(), "net.pt")
"""

import ast
import re
from collections.abc import Iterator

from paralab.doctor.events import LoadState, Save
from paralab.doctor.failures.checkpoints.files import (
    loads_of_files,
    same_file,
    strips_prefix,
    wrapper_saves,
)
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import listed, make_finding
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.context import catches
from paralab.doctor.static.facts import is_constant
from paralab.doctor.static.names import DDP
from paralab.doctor.static.report import code, found, line_of, replace
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"loading state_dict for (?!DistributedDataParallel|DataParallel).*Unexpected key\(s\) in "
        r"state_dict:.*?\"module\.",
        "The names in the checkpoint begin with `module.`{at}: it was saved from a DDP or "
        "DataParallel wrapper, but is loaded into a plain model.",
    ),
    Message(
        # Every name in a wrapper begins with `module.`, so missing names prove nothing.
        r"loading state_dict for (?:DistributedDataParallel|DataParallel):.*Unexpected key\(s\) in "
        r"state_dict:\s*\"(?!module\.)",
        "The names in the checkpoint lack `module.`{at}: it was saved from a plain model, but "
        "is loaded into a DDP or DataParallel wrapper.",
    ),
)

IF_PLAIN = "if a model without DDP loads the file, because its names do not match"


@check("C01", source="script")
def wrapper_is_saved(script: Script) -> Findings:
    """Report a saved wrapper. It is an error if a plain model loads the file."""
    saves, loads = wrapper_saves(script), loads_of_files(script)
    if strips_prefix(script) or script.methods_on("ddp", "load_state_dict"):
        return
    if not saves:
        yield from _by_name(script)
        return
    save, state = saves[0]
    why = f"`{code(state.node)}` ({line_of(state, save)}) is the state of the DDP wrapper: every name begins with `module.`"
    for call, load in loads:
        if not same_file(save, load) or catches(call.node, call.module, "RuntimeError"):
            continue
        if is_constant(call.argument(1, "strict"), False):
            return  # C02 reports this
        if script.kinds(call.receiver, call.scope) == {"module"} and state.receiver is not None:
            why += f". `{code(call.node.func)}` ({line_of(call, save)}) loads the file into a plain model and raises."
            edits = replace(script, state.module, state.receiver, f"{code(state.receiver)}.module")
            yield found(script, "C01", "error", save, why, also=(state, call), edits=edits)
            return
    yield found(script, "C01", "suspect", save, f"{why}.", doubt=IF_PLAIN, also=(state,))


def _by_name(script: Script) -> Findings:
    """Flag a saved model whose variable refers to the wrapper, in a project that never unwraps
    it."""
    wrapped = {_name(target) for target in _wrapped_names(script)} - {""}
    for save in script.calls_of("torch.save") if wrapped else ():
        given = save.argument(0, "obj")
        states = [c for c in script.contributors(given, save.scope) if c.method == "state_dict"]
        written = script.calls_within(given, save.scope) if given is not None else []
        models = [state.receiver for state in states]
        models += [one for call in written for one in call.node.args]
        scopes = {save.scope, *(state.scope for state in states)}
        scopes |= {call.scope for scope in list(scopes) for call in script.callers(scope)}
        if any(_UNWRAPS.search(ast.unparse(scope.node)) for scope in scopes):
            continue
        for model in models:
            if model is not None and _name(model) in wrapped:
                why = f"`{code(model)}` may be the DDP wrapper here. Then every saved name begins with `module.`."
                yield found(script, "C01", "suspect", save, why, doubt=IF_PLAIN)
                return


_UNWRAPS = re.compile(r"(?<!self)\.module\b|unwrap|without_ddp|[\"']module[\"']")


def _wrapped_names(script: Script) -> Iterator[ast.expr]:
    """Yield names that the script rebinds to the wrapper, as in `model = DDP(model)`."""
    for call in script.calls_of(DDP, "apex.parallel.DistributedDataParallel"):
        parent = call.module.parents.get(call.node)
        model = call.argument(0, "module")
        for target in getattr(parent, "targets", []):
            if model is not None and code(target) == code(model):
                yield target


def _name(node: ast.expr) -> str:
    """Return the last part of a name: `model` in `self.model`, `generator` in
    `model["generator"]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return (dotted_key(node) or "").rpartition(".")[2]


@check("C01", source="ranks")
def prefix_refused(seen: Observation) -> Findings:
    loads = [load for rank in seen.ranks for load in rank.of(LoadState)]
    refused = next((load for load in loads if load.error and only_prefix_differs(load)), None)
    if refused is None:
        return
    saves = [save for rank in seen.ranks for save in rank.of(Save) if save.prefixed]
    why = (
        f"The file contains the state of the DDP wrapper, whose names begin with 'module.'. "
        f"{refused.model_class} at {refused.site} rejects it: {refused.matched} of {refused.total} "
        "names match."
    )
    fix = f"{ENTRY.fix} For existing files: {{k.removeprefix('module.'): v for k, v in state.items()}}."
    names = f"missing {listed(refused.missing, 3)}; unexpected {listed(refused.unexpected, 3)}"
    yield make_finding("C01", "error", why, saves[0] if saves else refused, names, fix=fix)


def only_prefix_differs(load: LoadState) -> bool:
    """Return whether the names match once 'module.' is removed."""
    given = {name.removeprefix("module.") for name in load.unexpected}
    return bool(given) and given == {name.removeprefix("module.") for name in load.missing}
