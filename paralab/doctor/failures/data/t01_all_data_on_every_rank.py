"""T01: Every rank sees all the data. The check of watched ranks also reports T04.

Symptom: No error. An epoch takes as long as on one device, and every rank uses every sample.
Cause: The DataLoader has no DistributedSampler, so each rank goes through the whole dataset.
Fix: Pass `sampler=DistributedSampler(data)` instead of `shuffle=True`, and call `set_epoch` in every epoch.
Reported: Lightning-AI/pytorch-lightning#91 #81 huggingface/datasets#5360

- loader = DataLoader(data, batch_size=32, shuffle=True)
+ sampler = DistributedSampler(data, shuffle=True)
+ loader = DataLoader(data, batch_size=32, sampler=sampler)
"""

import ast

from paralab.doctor.events import Group, Pipeline
from paralab.doctor.failures.data.loaders import (
    FRAMEWORKS,
    hides_sampler,
    is_divided,
    is_for_evaluation,
    is_generated,
    is_missing,
    trained_loaders,
)
from paralab.doctor.failures.data.uses import Use, common_uses
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import ddp_wraps, is_data_parallel, make_finding, watched
from paralab.doctor.registry import Finding, Findings, Severity, check, describe
from paralab.doctor.static.facts import If, is_constant
from paralab.doctor.static.hints import words_of_project
from paralab.doctor.static.names import DDP, LOADER, SAMPLER
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import is_excluded

ENTRY = describe(__doc__)
IF_UNDIVIDED = "if nothing else divides the data among the ranks"


@check("T01", source="script")
def no_sampler(script: Script) -> Findings:
    """Report a training loader in a DDP job if nothing divides its data among the ranks."""
    if not script.calls_of(DDP) or script.imports(*FRAMEWORKS):
        return
    linked = trained_loaders(script)
    reported = False
    for loader in script.calls_of(LOADER):
        data, scope = loader.argument(0, "dataset"), loader.scope
        if data is None or hides_sampler(script, loader) or is_divided(script, loader, data):
            continue
        places = ((3, "sampler"), (4, "batch_sampler"))
        if not all(is_missing(script, loader, *place) for place in places):
            continue
        if any(script.differs(way.test, scope) for way in loader.inside(If)):
            continue  # only one rank has this loader
        if is_excluded(script, loader.node, loader.module) or is_generated(script, data, scope):
            continue
        if is_for_evaluation(loader) or not (loader in linked or "train" in code(data)):
            continue
        shuffle = loader.argument(2, "shuffle") or ast.Constant(False)
        why = f"No sampler: every rank goes through all of `{code(data)}`"
        severity: Severity = "warning"
        if script.truth(shuffle, scope, 0) is False:
            why += (
                " in the same order. All ranks compute the same gradients, like a single process."
            )
            severity = "error"
        else:
            why += " in random order. One epoch is one pass per rank."
        known = loader in linked and script.kinds(data, scope) == {"dataset"}
        doubt, also = "" if known else IF_UNDIVIDED, tuple(linked.get(loader, [])[:1])
        iterators = script.calls_of("builtins.iter")
        if any(loader in script.makers(one.argument(0, ""), one.scope) for one in iterators):
            doubt = doubt or "if the job counts epochs, not steps"  # `next(batches)` in each step
        reported = True
        yield found(script, "T01", severity, loader, why, doubt=doubt, also=also)
    if not reported and "DistributedSampler" not in words_of_project(script):
        yield from _by_name(script)


def _by_name(script: Script) -> Findings:
    """Flag a shuffled training loader in a project without a DistributedSampler."""
    for loader in script.calls_of(LOADER):
        data, shuffle = loader.argument(0, "dataset"), loader.argument(2, "shuffle")
        samplers = (loader.argument(3, "sampler"), loader.argument(4, "batch_sampler"))
        if data is None or samplers != (None, None) or hides_sampler(script, loader):
            continue
        if is_constant(shuffle, True) and "train" in code(data).lower():
            why = f"No sampler: every rank goes through all of `{code(data)}`."
            yield found(script, "T01", "suspect", loader, why, doubt=IF_UNDIVIDED)
            return


@check("T01", source="script")
def sampler_left_out(script: Script) -> Findings:
    """Flag a DistributedSampler that is never passed to a loader."""
    for sampler in script.calls_of(SAMPLER):
        targets = getattr(sampler.module.parents.get(sampler.node), "targets", [])
        if len(targets) != 1 or not isinstance(targets[0], ast.Name):
            continue
        name, nodes = targets[0].id, sampler.module.nodes_in(sampler.scope.node)
        uses = [one for one in nodes if isinstance(one, ast.Name) and one.id == name]
        # uses other than `sampler.set_epoch(epoch)` and `sampler is None`
        handed_on = any(
            isinstance(one.ctx, ast.Load)
            and not isinstance(sampler.module.parents.get(one), (ast.Attribute, ast.Compare))
            for one in uses
        )
        loaders = [one for one in script.calls_in(sampler.scope) if one.target == LOADER]
        if loaders and sampler.scope.is_function and not handed_on:
            why = f"No loader gets `{name}` ({line_of(sampler, loaders[0])}), so every rank reads all samples."
            yield found(script, "T01", "suspect", loaders[0], why, also=(sampler,))


@check("T01", source="script")
def seed_with_rank(script: Script) -> Findings:
    """Report a DistributedSampler whose ranks shuffle differently, so that their shares overlap."""
    for sampler in script.calls_of(SAMPLER):
        seed, shuffle = sampler.argument(4, "seed"), sampler.argument(3, "shuffle")
        if seed is None or (shuffle is not None and not script.truth(shuffle, sampler.scope, 0)):
            continue
        values = {script.evaluate(seed, sampler.scope, rank) for rank in (0, 1)}
        if len(values) < 2 or not all(isinstance(value, int) for value in values):
            continue
        why = (
            f"The seed `{code(seed)}` depends on the rank, so each rank shuffles differently before it takes its "
            "share. Multiple ranks get the same samples, and some samples reach no rank."
        )
        fix = "Use the same seed on all ranks; `set_epoch` changes the order."
        yield found(script, "T01", "error", sampler, why, fix)


@check("T01", "T04", source="ranks")
def same_data(seen: Observation) -> Findings:
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
    count = min(len(other.rows) for other in others)
    same = all(other.rows[:count] == use.rows[:count] for other in others)
    if count < 2 or not same or len({tuple(rows) for rows in use.rows[:count]}) < 2:
        return None
    loader, doubt = use.loader, _doubt(seen, use)
    if loader.replicas and len({other.loader.replica for other in others}) == len(others):
        return None  # the sampler divides the samples, so the dataset repeats its rows (S10)
    evidence = f"{count} inspected batches have the same rows on all {len(others)} ranks"
    if loader.iterable:
        why = f"All {seen.world} ranks read the same samples of {loader.dataset}: its __iter__ ignores the rank."
        return make_finding("T04", "error", why, use.place, evidence, doubt=doubt)
    why = (
        f"All {seen.world} ranks train on the same batches of {loader.batch_size}, because "
        f"{loader.sampler} does not divide the samples. Averaging equal gradients changes nothing."
    )
    return make_finding("T01", "error", why, use.place, evidence, doubt=doubt)


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
        f"{loader.sampler}, so one epoch is {seen.world} passes over the data."
    )
    evidence = f"{len(common[0])} of the inspected rows are on two ranks"
    return make_finding("T01", "warning", why, use.place, evidence, doubt=_doubt(seen, use))


def _doubt(seen: Observation, use: Use) -> str:
    """Return the condition under which the finding holds. Ranks that share one model may share its
    data."""
    groups = any(rank.of(Group) for rank in seen.ranks)
    if groups or any(0 < len(wrap.ranks) < seen.world for wrap in ddp_wraps(seen.ranks[0])):
        return "if every rank holds a whole model"
    return "" if use.trains else "if these batches are used for training"
