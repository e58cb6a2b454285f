"""How the ranks of a script find each other: as many as are waited for, a port that is free, and no
debugging that kills them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.registry import check
from paralab.doctor.script.calls import SPAWNS
from paralab.doctor.script.environment import settings
from paralab.doctor.script.naming import DDP
from paralab.doctor.script.pointing import called, found, line_of, place
from paralab.doctor.script.questions import is_dotted, number
from paralab.doctor.script.reading import Script
from paralab.doctor.script.settings import INIT, backends
from paralab.doctor.script.values import Call, Constant, Entered, Happening, Made, options

_LEVEL = "torch.distributed.set_debug_level"
_STORE = "torch.distributed.TCPStore"


@check("H18", source="script")
def more_ranks_wanted_than_started(script: Script) -> Iterator[Finding]:
    for spawn in script.calls_of(*sorted(SPAWNS)):
        started = number(spawn.argument(2, "nprocs") or Constant(1))
        inside = (
            call
            for call in script.calls_of(INIT)
            if any(entered.call is spawn for entered in call.inside(Entered))
        )
        for init in inside:
            wanted = number(init.argument(3, "world_size"))
            if (
                not isinstance(wanted, int)
                or not isinstance(started, int)
                or wanted <= started
                or not _is_spawned(init)
            ):
                continue
            why = (
                f"`{called(init)}` waits for {wanted} ranks, and `{called(spawn)}` ({place(spawn, init)}) starts {started}, with "
                f"ranks 0 to {started - 1}: the others never come, and all wait until the timeout."
            )
            fix = f"One number for both: world_size={started} here, or nprocs={wanted} where the ranks are started."
            yield found(script, "H18", "error", init, why, fix, also=(spawn,))


def _is_spawned(init: Call) -> bool:
    """Its rank is the number that spawn gives, as it is: not one among the ranks of several
    machines."""
    given = init.argument(4, "rank")
    ranks = list(options(given)) if given is not None else []
    return bool(ranks) and all(
        isinstance(r, Made) and r.call.target == "torch.multiprocessing.spawn.rank" for r in ranks
    )


@check("H19", source="script")
def debugging_that_crashes(script: Script) -> Iterator[Finding]:
    """DETAIL on gloo with DDP. torch reads the variable when it is imported: set later, it does
    nothing."""
    wraps = next(script.calls_of(DDP), None)
    if wraps is None or not {"gloo", None, "?"} & backends(script):
        return
    for at in (*_levels(script), *_variables(script)):
        why = (
            f"`{line_of(script, at)}` switches on checks that crash torch itself on gloo: every rank dies of SIGSEGV in "
            f"`{called(wraps)}` ({place(wraps, at)}), though nothing is wrong with it. Certain with torch 2.12 and 2.13"
            + ("." if backends(script) == {"gloo"} else ", if the backend is gloo.")
        )
        fix = "INFO in place of DETAIL; the order of collectives is in the flight recorder."
        yield found(script, "H19", "suspect", at, why, fix, also=(wraps,))


def _levels(script: Script) -> Iterator[Happening]:
    for call in script.calls_of(_LEVEL):
        if call.args and all(
            is_dotted(level, "torch.distributed.DebugLevel.DETAIL")
            for level in options(call.args[0])
        ):
            yield call


def _variables(script: Script) -> Iterator[Happening]:
    for name, value, at in settings(script):
        is_detail = isinstance(value, Constant) and str(value.value).upper() == "DETAIL"
        if name == "TORCH_DISTRIBUTED_DEBUG" and is_detail and _is_before_torch(script, at):
            yield at


def _is_before_torch(script: Script, at: Happening) -> bool:
    """In the file that is started, above its first import of torch; or in one that asks torch to
    read the environment again."""
    if any(True for _ in script.calls_of("torch.distributed.set_debug_level_from_env")):
        return True
    tree = script.trees.get(at.file)
    imports = [
        node.lineno
        for node in ast.walk(tree or ast.Module([], []))
        if (
            isinstance(node, ast.Import)
            and any(alias.name.split(".")[0] == "torch" for alias in node.names)
        )
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch")
    ]
    return at.file == script.path and at.line < min(imports, default=at.line)
