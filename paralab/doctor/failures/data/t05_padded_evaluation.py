"""T05: padded samples are counted in the evaluation."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.failures.data.loaders import is_loader, read_by, samples_in
from paralab.doctor.failures.data.uses import common_uses
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding, watched
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.facts import Call, With
from paralab.doctor.static.names import SAMPLER
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import found
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="T05",
    title="Padded samples are counted in the evaluation",
    symptom="The accuracy depends on the number of ranks.",
    cause="DistributedSampler repeats samples until all ranks have the same number. The repeated samples are evaluated twice.",
    fix="Split the evaluation data without padding, and all-reduce sums and counts.",
    example="""\
- test_sampler = DistributedSampler(test_data, shuffle=False)
+ test_sampler = range(dist.get_rank(), len(test_data), dist.get_world_size())
  test_loader = DataLoader(test_data, sampler=test_sampler)
""",
    sources=(
        "pytorch/pytorch#25162",
        "pytorch/pytorch#22584",
        "pytorch/examples#1063",
        "roboflow/rf-detr#1507",
        "areal-project/AReaL#1100",
    ),
    silent=True,
)


_LOOPS = (ast.For, ast.comprehension)


@check("T05", source="script")
def padded_evaluation(script: Script) -> Iterator[Finding]:
    """Suspect an evaluation with a DistributedSampler, which repeats samples to fill up all ranks."""
    padded = [
        (loader, sampler)
        for loader in script.calls
        if is_loader(script, loader)
        for given in [loader.argument(3, "sampler")]
        if given is not None
        for sampler in script.makers(given, loader.scope)
        if sampler.target == SAMPLER and sampler.argument(5, "drop_last") is None
    ]
    if not padded or _counts_samples(script):
        return
    evaluated = set(_evaluated(script))
    for loader, sampler in padded:
        samples = samples_in(script, loader.argument(0, "dataset"), loader.scope)
        if loader not in evaluated or (samples is not None and samples % 8 == 0):
            continue
        why = (
            "DistributedSampler repeats samples until all ranks have the same number, and the repeats count twice in the "
            "result. Certain if the number of samples is not a multiple of the number of ranks."
        )
        fix = "Evaluate `Subset(dataset, range(rank, len(dataset), world))`, or leave out the repeated samples."
        yield found(script, "T05", "suspect", loader, why, fix, also=(sampler,))


def _evaluated(script: Script) -> Iterator[Call]:
    """Yield the loaders that are read without gradients."""
    for module in script.modules:
        for node in module.nodes:
            if isinstance(node, _LOOPS):
                scope = module.scope_of(node)
                if _without_gradients(script, node, scope):
                    yield from read_by(script, node, scope)


def _without_gradients(script: Script, node: ast.AST, scope: Scope) -> bool:
    managers = [one.item for one in script.context(node, scope.module) if isinstance(one, With)]
    managers += getattr(scope.node, "decorator_list", [])
    return any(
        "no_grad" in ast.unparse(one) or "inference_mode" in ast.unparse(one) for one in managers
    )


def _counts_samples(script: Script) -> bool:
    """Return whether the script uses `len(loader.dataset)`, perhaps to correct the result."""
    return any("dataset" in ast.unparse(call.node) for call in script.calls_of("builtins.len"))


@check("T05", source="ranks")
def counted_twice(seen: Observation) -> Iterator[Finding]:
    """Report an evaluation of more samples than the dataset has."""
    reported: set[int] = set()
    for number, others in common_uses(seen) if watched(seen) else ():
        use = others[0]
        ends = [other.end.samples for other in others if other.end]
        total, ranks = use.loader.samples, len(seen.ranks)
        if number in reported or len(ends) < ranks or not use.evaluates or not total:
            continue
        if use.loader.replicas != ranks or not total < sum(ends) < total + ranks:
            continue
        reported.add(number)
        why = (
            f"The {ranks} ranks evaluate {sum(ends)} samples of a dataset of {total}: "
            f"DistributedSampler repeats {sum(ends) - total}, and those count twice."
        )
        counts = zip(seen.ranks, ends, strict=True)
        evidence = [f"rank {rank.rank}: {count} samples" for rank, count in counts]
        doubt = "if the script does not remove them later"
        yield make_finding("T05", "suspect", why, use.place, evidence, doubt=doubt)
