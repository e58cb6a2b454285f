"""T01: every rank sees all the data. T04 shares the check on ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.events import Group, Pipeline
from paralab.doctor.failures.data.loaders import (
    FRAMEWORKS,
    is_divided,
    is_for_evaluation,
    is_missing,
    trained_loaders,
)
from paralab.doctor.failures.data.uses import Use, common_uses
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import ddp_wraps, is_data_parallel, make_finding, watched
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.hints import words_of_project
from paralab.doctor.static.names import DDP, LOADER, SAMPLER
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="T01",
    title="Every rank sees all the data",
    symptom="No message. An epoch takes as long as on one device, and every sample is used once per rank.",
    cause="The DataLoader has no DistributedSampler, so each rank goes through the whole dataset.",
    fix="Pass `sampler=DistributedSampler(data)`.",
    example="""\
- loader = DataLoader(data, batch_size=32, shuffle=True)
+ sampler = DistributedSampler(data, shuffle=True)
+ loader = DataLoader(data, batch_size=32, sampler=sampler)
""",
    sources=(
        "Lightning-AI/pytorch-lightning#91",
        "Lightning-AI/pytorch-lightning#81",
        "huggingface/datasets#5360",
    ),
)
FIX = "pass sampler=DistributedSampler(dataset) instead of shuffle=True; call sampler.set_epoch(epoch) in every epoch"


@check("T01", source="script")
def no_sampler(script: Script) -> Iterator[Finding]:
    """Report a training loader in a DDP job if nothing divides its data between the ranks."""
    if not script.calls_of(DDP) or script.imports(*FRAMEWORKS):
        return
    linked = trained_loaders(script)
    reported = False
    for loader in script.calls_of(LOADER):
        data = loader.argument(0, "dataset")
        if data is None or loader.unpacks or is_divided(script, loader, data):
            continue
        if not all(
            is_missing(script, loader, place, name)
            for place, name in ((3, "sampler"), (4, "batch_sampler"))
        ):
            continue
        if any(script.differs(way.test, loader.scope) for way in loader.inside(If)):
            continue  # only one rank has this loader
        if loader not in linked and (
            is_for_evaluation(script, loader) or "train" not in code(data)
        ):
            continue
        shuffled = script.truth(
            loader.argument(2, "shuffle") or ast.Constant(False), loader.scope, 0
        )
        known = loader in linked and script.kinds(data, loader.scope) == {"dataset"}
        why = f"No sampler: every rank goes through all of `{code(data)}`"
        if shuffled is False:
            why += (
                " in the same order. All ranks compute the same gradients, like a single process."
            )
        else:
            why += " in its own random order. One epoch is one pass per rank."
        if not known:
            why += " Certain if nothing else divides the data between the ranks."
        fix = f"Use `sampler=DistributedSampler({code(data)})` without `shuffle`, and `sampler.set_epoch(epoch)` in every epoch."
        severity: Severity = "suspect" if not known else "error" if shuffled is False else "warning"
        also = tuple(linked[loader][:1]) if loader in linked else ()
        reported = True
        yield found(script, "T01", severity, loader, why, fix, also=also)
    if not reported and "DistributedSampler" not in words_of_project(script):
        yield from _by_name(script)


def _by_name(script: Script) -> Iterator[Finding]:
    """Suspect a shuffled loader for training in a project that has no DistributedSampler."""
    for loader in script.calls_of(LOADER):
        data, shuffle = loader.argument(0, "dataset"), loader.argument(2, "shuffle")
        samplers = (loader.argument(3, "sampler"), loader.argument(4, "batch_sampler"))
        if data is None or samplers != (None, None) or loader.unpacks:
            continue
        if isinstance(shuffle, ast.Constant) and shuffle.value and "train" in code(data).lower():
            why = f"No sampler: every rank goes through all of `{code(data)}`. Certain if nothing divides the data before."
            yield found(script, "T01", "suspect", loader, why, ENTRY.fix)
            return


@check("T01", source="script")
def sampler_left_out(script: Script) -> Iterator[Finding]:
    """Suspect a DistributedSampler that is passed to no loader."""
    for sampler in script.calls_of(SAMPLER):
        targets = getattr(sampler.module.parents.get(sampler.node), "targets", [])
        if len(targets) != 1 or not isinstance(targets[0], ast.Name):
            continue
        name, nodes = targets[0].id, sampler.module.nodes_in(sampler.scope.node)
        uses = [one for one in nodes if isinstance(one, ast.Name) and one.id == name]
        handed_on = [
            one for one in uses if isinstance(one.ctx, ast.Load) and _is_handed_on(sampler, one)
        ]
        loaders = [one for one in script.calls_in(sampler.scope) if one.target == LOADER]
        if loaders and sampler.scope.is_function and not handed_on:
            why = f"No loader gets `{name}` ({line_of(sampler, loaders[0])}), so every rank reads all samples."
            yield found(script, "T01", "suspect", loaders[0], why, ENTRY.fix, also=(sampler,))


def _is_handed_on(sampler: Call, use: ast.Name) -> bool:
    """Return whether a use is more than `sampler.set_epoch(epoch)` or `sampler is None`."""
    return not isinstance(sampler.module.parents.get(use), (ast.Attribute, ast.Compare))


@check("T01", source="script")
def seed_with_rank(script: Script) -> Iterator[Finding]:
    """Report a DistributedSampler whose ranks shuffle differently, so that their shares overlap."""
    for sampler in script.calls_of(SAMPLER):
        seed, shuffle = sampler.argument(4, "seed"), sampler.argument(3, "shuffle")
        if seed is None or (shuffle is not None and not script.truth(shuffle, sampler.scope, 0)):
            continue
        values = {script.evaluate(seed, sampler.scope, rank) for rank in (0, 1)}
        if len(values) < 2 or not all(isinstance(value, int) for value in values):
            continue
        why = (
            f"The seed `{code(seed)}` contains the rank, so every rank shuffles differently before it takes its "
            "share: some samples are on several ranks, others on none."
        )
        fix = "Use the same seed on all ranks; `set_epoch` changes the order."
        yield found(script, "T01", "error", sampler, why, fix)


@check("T01", "T04", source="ranks")
def same_data(seen: Observation) -> Iterator[Finding]:
    """Report loaders that give all ranks the same samples."""
    pipelines = any(rank.of(Pipeline) for rank in seen.ranks)
    if not is_data_parallel(seen) or not watched(seen) or pipelines:
        return
    reported: set[int] = set()
    for number, others in common_uses(seen):
        use = others[0]
        if number in reported or use.evaluates or use.is_split_later:
            continue
        if any(other.loader.made != use.loader.made for other in others):
            continue
        finding = _identical(seen, use, others) or _whole_dataset(seen, use, others)
        if finding is not None:
            reported.add(number)
            yield finding


def _identical(seen: Observation, use: Use, others: list[Use]) -> Finding | None:
    """Report ranks that read the same rows in the same batches."""
    count = min(len(other.rows) for other in others)
    same = all(other.rows[:count] == use.rows[:count] for other in others)
    if count < 2 or not same or len({tuple(rows) for rows in use.rows[:count]}) < 2:
        return None
    loader, doubt = use.loader, _doubt(seen, use)
    evidence = f"{count} inspected batches have the same rows on all {len(others)} ranks"
    if loader.iterable:
        why = (
            f"Every rank reads all of {loader.dataset}: its __iter__ does not use the rank, so all "
            f"{seen.world} ranks train on the same samples."
        )
        return make_finding("T04", "error", why, use.place, evidence, doubt=doubt)
    why = (
        f"{loader.sampler} does not divide samples between ranks: all {seen.world} ranks train on the "
        f"same batches of {loader.batch_size}, and averaging equal gradients changes nothing."
    )
    return make_finding("T01", "error", why, use.place, evidence, fix=FIX, doubt=doubt)


def _whole_dataset(seen: Observation, use: Use, others: list[Use]) -> Finding | None:
    """Report ranks that each read all samples in their own order."""
    loader = use.loader
    if loader.iterable or loader.replicas or not use.trains or not loader.samples:
        return None
    sizes = {loader.sampler_samples, *(other.loader.samples for other in others)}
    first = {row for rows in use.rows for row in rows}
    common = [first & {row for rows in other.rows for row in rows} for other in others[1:]]
    if sizes != {loader.samples} or not all(len(rows) > 1 for rows in common):
        return None
    why = (
        f"Each of the {seen.world} ranks goes through all {loader.samples} samples with its own "
        f"{loader.sampler}: one epoch is {seen.world} passes over the data."
    )
    evidence = (
        f"len(sampler) = len(dataset) = {loader.samples} on every rank",
        f"{len(common[0])} inspected rows are on two ranks",
    )
    doubt = _doubt(seen, use)
    return make_finding("T01", "warning", why, use.place, evidence, fix=FIX, doubt=doubt)


def _doubt(seen: Observation, use: Use) -> str:
    """Return what the finding depends on: ranks that share one model may share its data."""
    groups = any(rank.of(Group) for rank in seen.ranks)
    if groups or any(0 < len(wrap.ranks) < seen.world for wrap in ddp_wraps(seen.ranks[0])):
        return "if every rank holds a whole model"
    return "" if use.trains else "if these batches are used for training"
