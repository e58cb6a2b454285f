"""T05: The evaluation counts some samples twice.

Symptom: The accuracy depends on the number of ranks.
Cause: DistributedSampler repeats samples until all ranks have the same number.
Fix: Split the evaluation data without padding, then all-reduce the sums and the counts.
Reported: pytorch/pytorch#25162 #22584 pytorch/examples#1063 roboflow/rf-detr#1507 areal-project/AReaL#1100

- test_sampler = DistributedSampler(test_data, shuffle=False)
+ test_sampler = range(dist.get_rank(), len(test_data), dist.get_world_size())
  test_loader = DataLoader(test_data, sampler=test_sampler)
"""

import ast
import re
from collections.abc import Iterator

from paralab.doctor.failures.data.loaders import is_loader, read_by
from paralab.doctor.failures.data.sizes import rows
from paralab.doctor.failures.data.uses import common_uses
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding, watched
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.facts import Call, With
from paralab.doctor.static.names import SAMPLER
from paralab.doctor.static.report import code, found
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__, silent=True)


@check("T05", source="script")
def padded_evaluation(script: Script) -> Findings:
    """Flag an evaluation with a DistributedSampler, which repeats samples until all ranks have
    the same number."""
    padded = [
        (loader, sampler)
        for loader in script.calls
        if is_loader(script, loader)
        for sampler in script.makers(loader.argument(3, "sampler"), loader.scope)
        if sampler.target == SAMPLER and sampler.argument(5, "drop_last") is None
    ]
    if not padded or any("dataset" in code(c.node, 200) for c in script.calls_of("builtins.len")):
        return  # the script may correct the result with `len(loader.dataset)`
    evaluated = set(_find_evaluation_loaders(script))
    for loader, sampler in padded:
        samples = rows(script, loader.argument(0, "dataset"), loader.scope)
        if loader in evaluated and (samples is None or samples % 8):
            why = "DistributedSampler repeats samples until all ranks have the same number, and the repeats count twice."
            doubt = "if the number of samples is not a multiple of the number of ranks"
            yield found(script, "T05", "suspect", loader, why, doubt=doubt, also=(sampler,))


def _find_evaluation_loaders(script: Script) -> Iterator[Call]:
    """Yield the loaders that are read without gradients."""
    for module in script.modules:
        for node in module.nodes:
            if isinstance(node, (ast.For, ast.comprehension)):
                scope = module.scope_of(node)
                managers = [
                    one.item for one in script.context(node, module) if isinstance(one, With)
                ]
                managers += getattr(scope.node, "decorator_list", [])
                if re.search("no_grad|inference_mode", " ".join(map(ast.unparse, managers))):
                    yield from read_by(script, node, scope)


@check("T05", source="ranks")
def counted_twice(seen: Observation) -> Findings:
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
            f"The {ranks} ranks evaluate {sum(ends)} samples of a dataset of {total}. DistributedSampler "
            f"repeats {sum(ends) - total} of them, which then count twice."
        )
        doubt = "if the script does not remove the repeats later"
        yield make_finding("T05", "suspect", why, use.place, doubt=doubt)
