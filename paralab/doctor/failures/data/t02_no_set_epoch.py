"""T02: the same order in every epoch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paralab.doctor.events import SetEpoch
from paralab.doctor.failures.data.loaders import (
    FRAMEWORKS,
    Training,
    is_for_evaluation,
    is_loader,
    trainings,
)
from paralab.doctor.failures.data.uses import uses
from paralab.doctor.finding import Edit, Finding, Severity
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.facts import Call
from paralab.doctor.static.hints import trains, words_of_project
from paralab.doctor.static.names import SAMPLER
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import at, code, found, insert, line_of
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="T02",
    title="The same order in every epoch",
    symptom="No message. Every epoch has the same batches in the same order.",
    cause="DistributedSampler shuffles with seed + epoch, and nothing sets the epoch.",
    fix="Call `sampler.set_epoch(epoch)` at the start of every epoch.",
    example="""\
  sampler = DistributedSampler(data)
  for epoch in range(10):
+     sampler.set_epoch(epoch)
      train(loader)
""",
    sources=(
        "pytorch/pytorch#31771",
        "kan-bayashi/ParallelWaveGAN#177",
        "cszn/KAIR#106",
        "Spijkervet/SimCLR#26",
        "facebookresearch/ClassyVision#118",
    ),
    silent=True,
)


_SAMPLER_NAME = re.compile("Sampler")


@check("T02", source="script")
def no_set_epoch(script: Script) -> Iterator[Finding]:
    """Report a shuffling DistributedSampler whose epoch nothing sets."""
    samplers = [call for call in _samplers(script) if _shuffles(script, call)]
    samplers = _without_epoch(script, samplers)
    if not samplers or script.imports(*FRAMEWORKS):
        return
    every = list(trainings(script))
    reported: set[ast.AST] = set()
    for sampler in samplers:
        place = _loop_of(script, sampler, every)
        if place is None or place[0] in reported:
            continue
        loop, scope, linked = place
        reported.add(loop)
        where = at(loop, scope)
        why = (
            f"The sampler (`{code(sampler.node)}`, {line_of(sampler, where)}) shuffles with seed + epoch, but "
            "nothing calls its `set_epoch`. Every epoch has the same order, and each rank always gets the same samples."
        )
        fix = "Call `sampler.set_epoch(epoch)` at the start of every epoch."
        if script.methods("set_epoch"):
            why += " Certain if the calls of `set_epoch` do not reach this sampler."
        severity: Severity = "suspect" if script.methods("set_epoch") or not linked else "warning"
        edits = _edits(script, loop, scope)
        yield found(script, "T02", severity, where, why, fix, also=(sampler,), edits=edits)
    if script.methods("set_epoch"):
        return
    if not reported and (trains(script) or "set_epoch" not in words_of_project(script)):
        yield from _by_name(script, samplers, every)


def _samplers(script: Script) -> list[Call]:
    """Return the calls that create a DistributedSampler or a project subclass of it."""
    own = [one for one in script.calls_matching(_SAMPLER_NAME) if one.made is not None]
    made = [one for one in own if one.made and script.is_a(one.made, "DistributedSampler")]
    return [*script.calls_of(SAMPLER), *made]


def _by_name(script: Script, samplers: list[Call], every: list[Training]) -> Iterator[Finding]:
    """Suspect a training sampler if the script does not show which loop reads it."""
    for sampler in samplers:
        loaders = _loaders_of(script, sampler)
        hidden = not loaders or not every  # which loop reads it
        if hidden and not any(is_for_evaluation(script, one) for one in (sampler, *loaders)):
            why = (
                f"`{code(sampler.node)}` shuffles with seed + epoch, and nothing in the project calls `set_epoch`. "
                "Certain if a loop reads it more than once."
            )
            yield found(script, "T02", "suspect", sampler, why, ENTRY.fix)
            return


def _shuffles(script: Script, sampler: Call) -> bool:
    """Return whether the sampler shuffles: `shuffle` is True by default."""
    given = sampler.argument(3, "shuffle")
    return given is None or script.truth(given, sampler.scope, 0) is not False


def _without_epoch(script: Script, samplers: list[Call]) -> list[Call]:
    """Return samplers that no `set_epoch` reaches; none if an unknown sampler's epoch is set."""
    in_strings = any(
        isinstance(node, ast.Constant) and node.value == "set_epoch"
        for module in script.modules
        for node in module.nodes
    )
    if in_strings or any("sampler" in one.name for one in script.attributes.get("epoch", [])):
        return []
    covered: set[Call] = set()
    for call in script.methods("set_epoch"):
        contributors = script.contributors(call.receiver, call.scope) if call.receiver else []
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
    if is_for_evaluation(script, sampler) or any(is_for_evaluation(script, one) for one in loaders):
        return None
    for training in every:
        for loop, scope in training.loops:
            target = getattr(loop, "target", None)
            if isinstance(target, ast.Name) and "epoch" in target.id:
                return loop, scope, bool(loaders)
    return None


def _loaders_of(script: Script, sampler: Call) -> list[Call]:
    return [
        call
        for call in script.calls
        if is_loader(script, call)
        for given in [call.argument(3, "sampler") or call.argument(4, "batch_sampler")]
        if given is not None and sampler in script.contributors(given, call.scope)
    ]


def _repeats(script: Script, loop: ast.AST, scope: Scope) -> bool:
    """Return whether a loop runs more than once. `range(1)` does not."""
    items = getattr(loop, "iter", None)
    if isinstance(items, ast.Call) and len(items.args) == 1:
        return bool(script.evaluate(items.args[0], scope, 0) != 1)
    return True


def _edits(script: Script, loop: ast.AST, scope: Scope) -> tuple[Edit, ...]:
    """Put `loader.sampler.set_epoch(epoch)` first in the epoch loop around this loop."""
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


@check_each_rank("T02")
def same_order(rank: WatchedRank) -> Finding | None:
    """Report a shuffling DistributedSampler that gives the same order in two epochs."""
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
            continue  # reads only the first batch, or makes two passes per epoch on purpose
        why = (
            f"Passes {number - 1} and {number} over this loader have the same order: the sampler "
            f"shuffles with seed + epoch, and nothing calls set_epoch, so the epoch stays {epoch}."
        )
        evidence = f"rank {rank.rank}: both first batches have the same {len(use.rows[0])} rows"
        return make_finding("T02", "warning", why, use.loader, evidence)
    return None
