"""Find the files and states that a script saves and loads."""

import ast
import re

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import code
from paralab.doctor.static.script import Script

# Calls that give every process its own path, or that do not use a file at all.
_OWN_PATH = re.compile(
    r"(tempfile\.(mk|T|N)|uuid\.|os\.getpid|io\.BytesIO|time\.|datetime\.|secrets\.|random\.(rand|choice)|socket\.)"
)
_UNWRAPS = re.compile(r"hasattr|isinstance")
_OWN_NAME = re.compile(r"(^|_)(l?rank\w*|pid|proc\w*|worker\w*|shard\w*|buffer|bytes\w*|stream)(_|$)", re.I)  # fmt: skip


def is_own_path(script: Script, path: ast.expr, scope: Scope) -> bool:
    """Return whether each rank writes to a different path (named after the rank, or temporary), or
    to no file."""
    changes = script.calls_of("os.chdir", "contextlib.chdir")
    folders = [(one, call.scope) for call in changes for one in call.node.args]
    return any(_differs(script, one, where) for one, where in ((path, scope), *folders))


def _differs(script: Script, path: ast.expr, scope: Scope) -> bool:
    for part, where in script.ingredients(path, scope):
        if isinstance(part, ast.Call):
            call = script.call_at[part]
            if call.made is not None and "rank" in ast.unparse(call.made.node):
                return True  # an object that stores its rank
            if _OWN_PATH.match(call.target) or _OWN_NAME.search(call.method):
                return True
        key = dotted_key(part)
        if key and (
            script.is_kind(part, where, "rank", "main") or _OWN_NAME.search(key.rpartition(".")[2])
        ):
            return True
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and "rank" in part.value:
            return True
    return False


def wrapper_saves(script: Script) -> list[tuple[Call, Call]]:
    """Return each torch.save of a DDP wrapper's state, with its `state_dict` call."""
    return [
        (save, state)
        for save in script.calls_of("torch.save")
        for state in script.contributors(save.argument(0, "obj"), save.scope)
        if state.method == "state_dict"
        and script.kinds(state.receiver, state.scope) == {"ddp"}
        # `net.module.state_dict() if hasattr(net, "module") else net.state_dict()`
        and not any(_UNWRAPS.search(code(one.test, 200)) for one in state.inside(If))
    ]


def loads_of_files(script: Script) -> list[tuple[Call, Call]]:
    """Return each `load_state_dict`, with the torch.load that its state comes from."""
    return [
        (call, source)
        for call in script.methods("load_state_dict")
        for source in script.contributors(call.argument(0, "state_dict"), call.scope)
        if source.target == "torch.load"
    ]


def same_file(save: Call, load: Call) -> bool:
    """Return whether a save and a load use the same expression for the path."""
    return code(save.argument(1, "f"), 200) == code(load.argument(0, "f"), 200)


def strips_prefix(script: Script) -> bool:
    """Return whether anything in the project changes names that begin with `module.`."""
    consumed = script.methods("consume_prefix_in_state_dict_if_present")
    return bool(consumed) or any(text.startswith("module.") for text in script.strings)
