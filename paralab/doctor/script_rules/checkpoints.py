"""Checkpoints: who writes them, under which names, and where they are read to."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.finding import Edit, Finding
from paralab.doctor.registry import check
from paralab.doctor.script.agreement import in_a_job, is_alone, is_collective
from paralab.doctor.script.editing import swapped, with_keyword
from paralab.doctor.script.modules import is_off, is_wrapper
from paralab.doctor.script.pointing import called, found, line_of, place, short
from paralab.doctor.script.questions import (
    comes_from,
    depends_on_rank,
    origins,
    rank_branch,
    roles,
    sources,
)
from paralab.doctor.script.reading import Script
from paralab.doctor.script.settings import INIT, uses_cuda
from paralab.doctor.script.values import (
    Attr,
    Branch,
    Call,
    Choice,
    Computed,
    Constant,
    Entered,
    Generated,
    Made,
    Value,
    With,
)

SAVE, LOAD = "torch.save", "torch.load"
_STRIPS = (
    "removeprefix",
    "replace",
    "lstrip",
    "consume_prefix_in_state_dict_if_present",
    "startswith",
    "partition",
    "split",
)
# Paths that are different in every process, or no files at all.
_OWN_PATHS = (
    "tempfile.mk",
    "tempfile.T",
    "tempfile.N",
    "uuid.",
    "os.getpid",
    "io.BytesIO",
    "time.",
    "datetime.",
    "secrets.",
    "random.",
)
_OF_NUMBERS = {"scaler", "scheduler", "sampler"}  # their states hold no tensors on a device


@check("C01", source="script")
def wrapper_is_saved(script: Script) -> Iterator[Finding]:
    saves = [
        call
        for call in script.calls_of(SAVE)
        if _state_of_wrapper(call.argument(0, "obj")) is not None
    ]
    if not saves or _strips_names(script):
        return
    loads = [call for call in script.methods("load_state_dict") if _is_loaded(call)]
    if any(is_wrapper(call.receiver) or "ddp" in roles(call.receiver) for call in loads):
        return
    plain = [call for call in loads if "module" in roles(call.receiver)]
    strict = [call for call in plain if not is_off(call.argument(1, "strict"))]
    if plain and not strict:
        return  # C02
    save = saves[0]
    state = _state_of_wrapper(save.argument(0, "obj"))
    assert state
    why = f"`{called(state)}()` ({place(state, save)}) is the state of the DDP wrapper, whose names all begin with `module.`"
    if strict:
        why += f"; `{called(strict[0])}` in {place(strict[0], save)} reads it into a plain model, which has no such names: it raises."
        edits = _of_the_module(script, state)
        yield found(
            script,
            "C01",
            "error",
            save,
            why,
            "Save `model.module.state_dict()`.",
            also=(state, strict[0]),
            edits=edits,
        )
    else:
        why += (
            ", so a model without DDP cannot read the file. Certain if it is ever read without DDP."
        )
        yield found(
            script, "C01", "suspect", save, why, "Save `model.module.state_dict()`.", also=(state,)
        )


def _of_the_module(script: Script, state: Call) -> tuple[Edit, ...]:
    """`model.state_dict()` → `model.module.state_dict()`, if it is a wrapper's whenever this line
    is reached."""
    node = state.node
    same = [call for call in script.calls if call.node is node]
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or not all(is_wrapper(c.receiver) for c in same)
    ):
        return ()
    return swapped(script, state.file, node.func.value, f"{short(node.func.value, 1000)}.module")


def _state_of_wrapper(content: Value | None) -> Call | None:
    """The call of `ddp.state_dict()` that this was made from."""
    calls = sources(content) if content else iter(())
    return next(
        (call for call in calls if call.method == "state_dict" and is_wrapper(call.receiver)), None
    )


def _is_loaded(call: Call) -> bool:
    given = call.argument(0, "state_dict")
    return given is not None and any(source.target == LOAD for source in sources(given))


def _strips_names(script: Script) -> bool:
    """Somewhere names of a state are changed: `name.removeprefix("module.")`, `name[7:]`."""
    words = (
        node.value
        for node in script.all_nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    if any(word.startswith("module.") for word in words):
        return True
    return any(call.method == "consume_prefix_in_state_dict_if_present" for call in script.calls)


@check("C02", source="script")
def loads_perhaps_nothing(script: Script) -> Iterator[Finding]:
    if not in_a_job(script) or _strips_names(script):
        return
    unused = _statements(script)
    loading = [
        call
        for call in script.methods("load_state_dict")
        if is_off(call.argument(1, "strict")) and id(call.node) in unused
    ]
    if not loading:
        return
    wrapped = next(
        (call for call in script.calls_of(SAVE) if _state_of_wrapper(call.argument(0, "obj"))), None
    )
    for call in loading:
        if not _is_loaded(call):
            continue
        if is_wrapper(call.receiver):
            continue
        if wrapped:
            why = (
                "With strict=False names that do not fit are passed over. The file holds the state of the DDP wrapper "
                f"({place(wrapped, call)}), whose names all begin with `module.`: nothing is read, and the weights stay "
                "random."
            )
            yield found(
                script,
                "C02",
                "error",
                call,
                why,
                "Save `model.module.state_dict()`, and look at what is returned.",
                also=(wrapped,),
            )
        else:
            why = (
                f"`{line_of(script, call)}` passes over names that do not fit, and what it returns (missing and unexpected "
                "names) is not looked at. If the file was saved from a DDP model, nothing is read. Certain once "
                "`missing_keys` holds all names."
            )
            fix = "missing, unexpected = model.load_state_dict(…, strict=False), and check both."
            yield found(script, "C02", "suspect", call, why, fix)


def _statements(script: Script) -> set[int]:
    """The calls whose result is thrown away."""
    return {id(node.value) for node in script.all_nodes if isinstance(node, ast.Expr)}


@check("C03", source="script")
def all_ranks_save_to_one_file(script: Script) -> Iterator[Finding]:
    starts = [call for call in script.calls_of(INIT) if not is_alone(call)]
    moves = [call for call in script.calls if call.target in ("os.chdir", "contextlib.chdir")]
    if not starts or any(comes_from(value, "rank") for call in moves for value in call.args):
        return  # or every rank has a folder of its own
    for call in script.calls_of(SAVE):
        path = call.argument(1, "f")
        if (
            path is None
            or is_alone(call)
            or rank_branch(call) is not None
            or call.number < starts[0].number
        ):
            continue
        if (
            comes_from(path, "rank")
            or any(source.target.startswith(_OWN_PATHS) for source in sources(path))
            or not _is_known(path)
        ):
            continue
        if _is_of_some_ranks_object(call) or _in_turns(script, call):
            continue
        unclear = next((branch for branch in call.inside(Branch) if _is_unclear(branch.test)), None)
        certain = (
            f" Certain if the condition in line {unclear.node.lineno} is true on all ranks."
            if unclear
            else ""
        )
        why = (
            f"All ranks reach `{line_of(script, call)}` with the same path: they write one file at the same time and can spoil it."
            f"{certain}"
        )
        fix = "Save on rank 0 only (`if rank == 0:`), then dist.barrier() before anybody reads it."
        yield found(script, "C03", "suspect" if unclear else "error", call, why, fix)


def _is_unclear(test: Value) -> bool:
    """It asks for something of which the script does not show where it comes from: an object that
    another function handed over."""
    return any(
        type(origin) is Value
        or (isinstance(origin, Made) and origin.call.target == "dataclasses.field")
        or (
            isinstance(origin, Attr)
            and isinstance(origin.base, Made | Generated)
            and "arguments" not in roles(origin.base)
        )
        for origin in origins(test)
    )


def _is_of_some_ranks_object(call: Call) -> bool:
    """Other ranks call something else there: `save = torch.save if rank == 0 else skip`, a Saver or
    nothing."""
    callers = [
        context.call
        for context in call.context
        if isinstance(context, Entered) and isinstance(context.call, Call)
    ]
    chosen = [caller.function for caller in (call, *callers) if isinstance(caller.function, Choice)]
    return any(depends_on_rank(test) for choice in chosen for test in choice.tests)


def _in_turns(script: Script, call: Call) -> bool:
    """One rank goes first: between `if rank != 0: dist.barrier()` and `if rank == 0:
    dist.barrier()`, or in a manager of these."""
    meetings = [other for other in script.calls if is_collective(other)]
    managers = {block.node for block in call.inside(With)}
    for entered in (
        context for other in meetings if rank_branch(other) for context in other.inside(Entered)
    ):
        if isinstance(entered.call, Call) and entered.call.node in managers:
            return True
    before = [rank_branch(other) for other in meetings if other.number < call.number][-1:]
    after = [rank_branch(other) for other in meetings if other.number > call.number][:1]
    return bool(before and after and before[0] and after[0])


def _is_known(path: Value) -> bool:
    """A path that is made of constants, options and counters: nothing that we cannot see."""
    return any(
        isinstance(origin, Constant) and isinstance(origin.value, str) for origin in origins(path)
    ) or any(isinstance(origin, Computed) and origin.op == "FString" for origin in origins(path))


@check("C04", source="script")
def loads_to_the_device_of_the_saver(script: Script) -> Iterator[Finding]:
    if not in_a_job(script) or not uses_cuda(script):
        return
    loading = [
        call for call in script.methods("load_state_dict") if not roles(call.receiver) & _OF_NUMBERS
    ]
    used = {id(o) for call in loading for a in call.args for o in origins(a) if isinstance(o, Made)}
    for call in script.calls_of(LOAD):
        if (
            call.argument(1, "map_location") is None
            and "**" not in call.keywords
            and id(call.result) in used
            and not rank_branch(call)
        ):
            why = (
                f"`{line_of(script, call)}` puts the tensors where they were saved from, usually cuda:0: every rank of the "
                "machine keeps a copy of the checkpoint on GPU 0."
            )
            fix = 'torch.load(…, map_location="cpu"), or the rank\'s own device.'
            yield found(
                script,
                "C04",
                "warning",
                call,
                why,
                fix,
                edits=with_keyword(script, call.file, call.node, 'map_location="cpu"'),
            )
