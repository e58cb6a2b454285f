"""T02: Every epoch has the same order.

Symptom: No error. Every epoch has the same batches in the same order.
Cause: DistributedSampler shuffles with seed + epoch, and nothing sets the epoch.
Fix: Call `sampler.set_epoch(epoch)` at the start of every epoch.
Reported: pytorch/pytorch#31771 kan-bayashi/ParallelWaveGAN#177 cszn/KAIR#106 Spijkervet/SimCLR#26
facebookresearch/ClassyVision#118

  sampler = DistributedSampler(data)
  for epoch in range(10):
+     sampler.set_epoch(epoch)
      train(loader)
"""

import ast
import re

from paralab.doctor.events import SetEpoch
from paralab.doctor.failures.data.loaders import (
    FRAMEWORKS,
    Training,
    is_for_evaluation,
    is_loader,
    trainings,
)
from paralab.doctor.failures.data.uses import uses
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Edit, Finding, Findings, check, describe
from paralab.doctor.static.facts import Call, Loop
from paralab.doctor.static.hints import is_parallel, trains, words_of_project
from paralab.doctor.static.names import SAMPLER
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import at, code, found, insert, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import arrives, ways_to

ENTRY = describe(__doc__, silent=True)


_SAMPLER_NAME = re.compile("Sampler")


@check("T02", source="script")
def no_set_epoch(script: Script) -> Findings:
    """Report a shuffling DistributedSampler whose epoch is never set."""
    own = [one for one in script.calls_matching(_SAMPLER_NAME) if one.made is not None]
    made = [one for one in own if one.made and script.is_a(one.made, "DistributedSampler")]
    samplers = [
        call
        for call in (*script.calls_of(SAMPLER), *made)
        if script.truth(call.argument(3, "shuffle") or ast.Constant(True), call.scope, 0)
        is not False
    ]
    samplers = _without_epoch(script, samplers)
    if not samplers or script.imports(*FRAMEWORKS):
        return
    every = list(trainings(script))
    reported: set[ast.AST] = set()
    sets = script.methods("set_epoch")
    for sampler in samplers:
        place = _loop_of(script, sampler, every)
        if place is None or place[0] in reported:
            continue
        loop, scope, linked = place
        reported.add(loop)
        where = at(loop, scope)
        why = (
            f"Nothing calls `set_epoch` on the sampler (`{code(sampler.node)}`, "
            f"{line_of(sampler, where)}), so every "
            "epoch has the same order, and each rank always gets the same samples."
        )
        doubt = "" if linked else "if this loop reads the sampler's loader more than once"
        if sampler.inside(Loop):  # `for epoch in …: sampler = DistributedSampler(load(epoch))`
            doubt = doubt or "if the dataset is the same in every epoch"
        doubt = "if the calls to `set_epoch` do not reach this sampler" if sets else doubt
        edits = _edits(script, loop, scope)
        yield found(script, "T02", "warning", where, why, doubt=doubt, also=(sampler,), edits=edits)
    if reported or sets or not (trains(script) or "set_epoch" not in words_of_project(script)):
        return
    for sampler in samplers:
        loaders = _loaders_of(script, sampler)
        hidden = not loaders or not every  # the script does not show which loop reads it
        if hidden and not any(is_for_evaluation(one) for one in (sampler, *loaders)):
            why = f"`{code(sampler.node)}` shuffles with seed + epoch, and nothing in the project calls `set_epoch`."
            doubt = "if a loop reads it more than once"
            yield found(script, "T02", "suspect", sampler, why, doubt=doubt)
            return


def _without_epoch(script: Script, samplers: list[Call]) -> list[Call]:
    """Return the samplers that no `set_epoch` call reaches. Return none if any call reaches an
    unknown sampler."""
    stored = any("sampler" in one.name for one in script.attributes.get("epoch", []))
    if stored or "set_epoch" in script.strings:
        return []
    covered: set[Call] = set()
    for call in script.methods("set_epoch"):
        contributors = script.contributors(call.receiver, call.scope)
        reached = [sampler for sampler in samplers if sampler in contributors]
        if not reached:
            return []
        covered.update(reached)
    return [sampler for sampler in samplers if sampler not in covered]


def _loop_of(
    script: Script, sampler: Call, every: list[Training]
) -> tuple[ast.AST, Scope, bool] | None:
    """Return the training loop that rereads a sampler's loader, and whether that is certain."""
    loaders = _loaders_of(script, sampler)
    for training in every:
        for loader in loaders:
            place = training.loop_over(script, loader)
            if place and _repeats(script, *training.loops[place - 1]):
                return *training.loops[place], True
    if is_for_evaluation(sampler) or any(is_for_evaluation(one) for one in loaders):
        return None
    ways = [way for way in ways_to(script, sampler) if way.known]
    made = bool(loaders) and any(arrives(script, way, 1).taken is not False for way in ways)
    for training in every:
        for loop, scope in training.loops:
            target = getattr(loop, "target", None)
            named = isinstance(target, ast.Name) and "epoch" in target.id
            if named and _repeats(script, loop, scope):
                return loop, scope, made
    return None


def _loaders_of(script: Script, sampler: Call) -> list[Call]:
    return [
        call
        for call in script.calls
        if is_loader(script, call)
        for given in [call.argument(3, "sampler") or call.argument(4, "batch_sampler")]
        if sampler in script.contributors(given, call.scope)
    ]


def _repeats(script: Script, loop: ast.AST, scope: Scope) -> bool:
    """Return whether a loop may run more than once. `range(1)` does not."""
    items = getattr(loop, "iter", None)
    if isinstance(items, ast.Call) and len(items.args) == 1:
        return bool(script.evaluate(items.args[0], scope, 0) != 1)
    return True


def _edits(script: Script, loop: ast.AST, scope: Scope) -> tuple[Edit, ...]:
    """Insert `loader.sampler.set_epoch(epoch)` at the start of the enclosing epoch loop."""
    outer = scope.module.parents.get(loop)
    items = getattr(loop, "iter", None)
    while isinstance(items, ast.Call) and items.args:
        items = items.args[0]
    if (
        not isinstance(outer, ast.For)
        or not isinstance(outer.target, ast.Name)
        or outer.target.id == "_"
        or not isinstance(items, (ast.Name, ast.Attribute))
    ):
        return ()
    line = f"{code(items)}.sampler.set_epoch({outer.target.id})"
    return insert(script, scope.module, outer.body[0], line)


_ORDERS = ("shuffle", "randperm", "permutation", "sample")


@check("T02", source="script")
def shuffled_once(script: Script) -> Findings:
    """Flag a sampler that shuffles when it is created, and never again."""
    classes = [scope for scope in script.scopes if scope.is_class]
    for owner in classes if is_parallel(script) else ():
        if not script.is_a(owner, "Sampler", "BatchSampler") or script.method(owner, "set_epoch"):
            continue
        first, later = script.method(owner, "__init__"), script.method(owner, "__iter__")
        if first is None or later is None or _orders(script, later):
            continue
        for call in _orders(script, first)[:1]:
            why = f"`{owner.name}` shuffles only here, so every epoch has the same batches in the same order."
            doubt = "if one object is used for multiple epochs"
            fix = "Shuffle in `__iter__` with seed + epoch, and let `set_epoch` change the epoch."
            yield found(script, "T02", "suspect", call, why, fix, doubt=doubt)


def _orders(script: Script, function: Scope) -> list[Call]:
    return [call for call in script.reached(function) if call.method in _ORDERS]


@check_each_rank("T02")
def same_order(rank: WatchedRank) -> Finding | None:
    every = uses(rank)
    for (loader, number), use in every.items():
        before = every.get((loader, number - 1))
        epoch = use.loader.sampler_epoch
        if before is None or not use.trains or not use.loader.shuffle:
            continue
        if use.loader.replicas is None or epoch is None or epoch != before.loader.sampler_epoch:
            continue
        if not use.rows or use.rows[0] != before.rows[0]:
            continue
        if len({event.epoch for event in rank.of(SetEpoch)}) > 1:
            continue  # one pass reads only the first batch, or an epoch has two passes on purpose
        why = (
            f"Passes {number - 1} and {number} over this loader begin with the same {len(use.rows[0])} "
            f"rows: nothing calls set_epoch, so the sampler shuffles both times with epoch {epoch}."
        )
        return make_finding("T02", "warning", why, use.loader)
    return None
