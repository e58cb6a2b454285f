"""C01: parameter names that begin with 'module.'."""

from __future__ import annotations

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
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import listed, make_finding
from paralab.doctor.registry import Entry, Message, check
from paralab.doctor.static.names import DDP
from paralab.doctor.static.project import dotted_key
from paralab.doctor.static.report import code, found, line_of, replace
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="C01",
    title="Parameter names that begin with 'module.'",
    symptom='\'Missing key(s) in state_dict: "0.weight" … Unexpected key(s): "module.0.weight"\'.',
    cause="The checkpoint holds the state of the DDP wrapper, which puts 'module.' before every name.",
    fix="Save `model.module.state_dict()`.",
    example="""\
  model = DistributedDataParallel(net)
- torch.save(model.state_dict(), "net.pt")
+ torch.save(model.module.state_dict(), "net.pt")
""",
    sources=(
        "pytorch/pytorch#3805",
        "menzelab/implicit-shape-reconstruction#2",
        "facebookresearch/fairchem#76",
    ),
    messages=(
        Message(
            r"loading state_dict for (?!DistributedDataParallel|DataParallel).*Unexpected key\(s\) in "
            r"state_dict:.*?\"module\.",
            "The keys of the checkpoint begin with `module.`{at}: it was saved from the DDP or "
            "DataParallel wrapper and is loaded into a plain model.",
        ),
        Message(
            # Every name in a wrapper begins with `module.`, so missing names prove nothing.
            r"loading state_dict for (?:DistributedDataParallel|DataParallel):.*Unexpected key\(s\) in "
            r"state_dict:\s*\"(?!module\.)",
            "The keys of the checkpoint lack `module.`{at}: it was saved from a plain model and is "
            "loaded into a DDP or DataParallel wrapper.",
        ),
    ),
)


@check("C01", source="script")
def wrapper_is_saved(script: Script) -> Iterator[Finding]:
    """Report a saved wrapper; it is an error if a plain model loads that file."""
    saves = wrapper_saves(script)
    if strips_prefix(script):
        return
    if not saves:
        yield from _by_name(script)
        return
    loads = loads_of_files(script)
    if any("ddp" in script.kinds(call.receiver, call.scope) for call, _ in loads):
        return
    save, state = saves[0]
    why = f"`{code(state.node)}` ({line_of(state, save)}) is the state of the DDP wrapper: every name begins with `module.`"
    for call, load in loads:
        strict = call.argument(1, "strict")
        if not same_file(save, load):
            continue
        if isinstance(strict, ast.Constant) and strict.value is False:
            return  # C02
        if script.kinds(call.receiver, call.scope) != {"module"}:
            continue
        why += f". `{code(call.node.func)}` ({line_of(call, save)}) loads the file into a plain model and raises."
        assert state.receiver is not None
        edits = replace(script, state.module, state.receiver, f"{code(state.receiver)}.module")
        yield found(script, "C01", "error", save, why, ENTRY.fix, also=(state, call), edits=edits)
        return
    why += ", so a model without DDP cannot load the file. Certain if one does."
    yield found(script, "C01", "suspect", save, why, ENTRY.fix, also=(state,))


def _by_name(script: Script) -> Iterator[Finding]:
    """Suspect a saved model whose name holds the wrapper, in a project that never unwraps it."""
    wrapped = {_name(target) for target in _wrapped_names(script)} - {""}
    if not wrapped:
        return
    if any(
        script.is_kind(one.receiver, one.scope, "ddp") for one in script.methods("load_state_dict")
    ):
        return
    for save in script.calls_of("torch.save"):
        given = save.argument(0, "obj")
        calls = script.contributors(given, save.scope) if given is not None else []
        names = [one.receiver for one in calls if one.method == "state_dict"]
        written = script.calls_within(given, save.scope) if given is not None else []
        names += [one for call in written for one in call.node.args]
        scopes = {save.scope, *(one.scope for one in calls if one.method == "state_dict")}
        scopes |= {call.scope for scope in list(scopes) for call in script.callers(scope)}
        texts = [ast.unparse(scope.node) for scope in scopes]
        for model in names if not any(_UNWRAPS.search(text) for text in texts) else ():
            if model is not None and _name(model) in wrapped:
                why = (
                    f"`{code(model)}` may be the DDP wrapper here: then every saved name begins with `module.`, "
                    "and a model without DDP cannot load the file. Certain if one does."
                )
                yield found(script, "C01", "suspect", save, why, ENTRY.fix)
                return


_UNWRAPS = re.compile(r"(?<!self)\.module\b|unwrap|without_ddp|[\"']module[\"']")


def _wrapped_names(script: Script) -> Iterator[ast.expr]:
    """Yield names that hold the wrapper from here on, as in `model = DDP(model)`."""
    for call in script.calls_of(DDP, "apex.parallel.DistributedDataParallel"):
        parent = call.module.parents.get(call.node)
        model = call.argument(0, "module")
        for target in getattr(parent, "targets", []):
            if model is not None and code(target) == code(model):
                yield target


def _name(node: ast.expr) -> str:
    """Return the end of a name: `model` of `self.model`, `generator` of `model["generator"]`."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return (dotted_key(node) or "").rpartition(".")[2]


@check("C01", source="ranks")
def prefix_refused(seen: Observation) -> Iterator[Finding]:
    """Report a state with DDP's prefix that a model refused."""
    loads = [load for rank in seen.ranks for load in rank.of(LoadState)]
    refused = next((load for load in loads if load.error and only_prefix_differs(load)), None)
    if refused is None:
        return
    saves = [save for rank in seen.ranks for save in rank.of(Save) if save.prefixed]
    number = f"{saves[0].prefixed} " if saves else ""
    why = (
        f"The saved state has {number}names that begin with 'module.' (it comes from the DDP wrapper). "
        f"{refused.model_class} at {refused.site} refuses it: {refused.matched} of {refused.total} "
        "names match."
    )
    fix = (
        "Save model.module.state_dict(). For existing files: "
        "{k.removeprefix('module.'): v for k, v in state.items()}."
    )
    evidence = (
        f"missing: {listed(refused.missing, 3)}",
        f"unexpected: {listed(refused.unexpected, 3)}",
    )
    yield make_finding("C01", "error", why, saves[0] if saves else refused, evidence, fix=fix)


def only_prefix_differs(load: LoadState) -> bool:
    """Return whether the names match once 'module.' is removed."""
    given, wanted = (
        {name.removeprefix("module.") for name in names}
        for names in (load.unexpected, load.missing)
    )
    return bool(given) and given == wanted
