"""Find which loader feeds which training loop, if the script shows it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import Call, Loop
from paralab.doctor.static.models import is_without_grad
from paralab.doctor.static.names import LOADER, meaning
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import Way, arrives, excludes, starts_of_job, ways_to

# Frameworks that divide the data among ranks and call set_epoch themselves.
FRAMEWORKS = (
    "accelerate", "pytorch_lightning", "lightning", "lightning_fabric", "composer", "fastai",
    "mmcv", "mmengine", "catalyst", "ray", "determined",
)  # fmt: skip
_EVALUATION = re.compile(r"(^|_)(val|valid\w*|test\w*|eval\w*|dev|query|gallery|infer\w*)(_|\d|$)", re.I)  # fmt: skip
# Names in code that divides data among ranks.
_DIVIDES = re.compile(r"rank|world_?size|num_replicas|shard|split_dataset_by_node|num_parts", re.I)


@dataclass(frozen=True)
class Training:
    """A backward pass, a path to it, and the loops on that path, outermost first."""

    backward: Call
    way: Way
    loops: tuple[tuple[ast.AST, Scope], ...]

    def loop_over(self, script: Script, loader: Call) -> int | None:
        """Return the position of the loop that reads a loader."""
        for place in reversed(range(len(self.loops))):
            if loader in read_by(script, *self.loops[place]):
                return place
        return None


def trainings(script: Script) -> Iterator[Training]:
    """Yield every path to a backward pass."""
    for call in script.methods("backward"):
        for way in ways_to(script, call):
            loops = tuple((one.node, each.scope) for each in way.calls for one in each.inside(Loop))
            yield Training(call, way, loops)


def read_by(script: Script, loop: ast.AST, scope: Scope) -> list[Call]:
    """Return the loaders that a loop reads in its header, or with `next(…)` in its body."""
    items = [getattr(loop, "iter", None)]
    if not isinstance(loop, ast.comprehension):
        items += [
            node.args[0]
            for node in ast.walk(loop)
            if isinstance(node, ast.Call) and dotted_key(node.func) == "next" and node.args
        ]
    return [
        call
        for item in items
        if item is not None and not _is_counted(script, item, scope)
        for call in script.contributors(item, scope)
        if is_loader(script, call)
    ]


def _is_counted(script: Script, item: ast.expr, scope: Scope) -> bool:
    """Return whether an item is `data[i]`, an element of a list that was filled earlier."""
    while isinstance(item, ast.Call) and item.args:
        item = item.args[0]
    return isinstance(item, ast.Subscript) and script.is_kind(item.slice, scope, "counter")


def is_loader(script: Script, call: Call) -> bool:
    return call.target == LOADER or (call.made is not None and script.is_a(call.made, "DataLoader"))


def trained_loaders(script: Script) -> dict[Call, list[Call]]:
    """Return the loaders that feed backward passes in a multi-rank job, with those passes."""
    starts = starts_of_job(script)
    found: dict[Call, list[Call]] = {}
    for training in trainings(script):
        if all(excludes(training.way, start) for start in starts):
            continue
        if arrives(script, training.way, 1).taken is False:
            continue
        for loop, scope in training.loops:
            slices = [node.slice for node in ast.walk(loop) if isinstance(node, ast.Subscript)]
            if any(meaning(name) for one in slices for name in _names(one)):
                continue  # each rank takes its share of every batch: `x[rank::world]`
            for loader in read_by(script, loop, scope):
                found.setdefault(loader, []).append(training.backward)
    return found


def is_missing(script: Script, call: Call, place: int, name: str) -> bool:
    """Return whether an argument is definitely absent or None in a multi-rank job."""
    given = call.argument(place, name)
    return given is None or script.evaluate(given, call.scope, 1) is None


def hides_sampler(script: Script, loader: Call) -> bool:
    """Return whether `*args` or `**options` may contain a sampler. Options are known if they are
    literals: `options = {"pin_memory": True} if cuda else {}`."""
    if any(isinstance(one, ast.Starred) for one in loader.node.args):
        return True
    for keyword in loader.node.keywords if loader.unpacks else ():
        if keyword.arg is not None:
            continue
        values = [one.value for one in script.reaching(keyword.value, loader.scope)]
        ways = [way for one in values for way in _ways(one)]
        keys = [key for way in ways if isinstance(way, ast.Dict) for key in way.keys]
        is_known = ways and all(isinstance(way, ast.Dict) for way in ways)
        if not is_known or not all(isinstance(key, ast.Constant) for key in keys):
            return True
        if any("sampler" in str(getattr(key, "value", "")) for key in keys):
            return True
    return False


def _ways(node: ast.expr | None) -> list[ast.expr | None]:
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]


def is_divided(script: Script, loader: Call, data: ast.expr) -> bool:
    """Return whether a dataset depends on the rank or on random numbers, or is a stream (T04)."""
    if knows_rank(script, data, loader.scope):
        return True
    seeds = [one.argument(0, "seed") for one in script.calls_of("torch.manual_seed")]
    seeded = bool(seeds) and all(isinstance(seed, ast.Constant) for seed in seeds)
    for call in script.contributors(data, loader.scope):
        owner = call.made
        drawn = call.target.startswith("torch.rand") and call.argument(99, "generator") is None
        if (drawn and not seeded) or _DIVIDES.search(call.method):
            return True
        if owner and (script.is_a(owner, "IterableDataset") or asks_for_rank(script, owner)):
            return True
    return False


def is_generated(script: Script, data: ast.expr, scope: Scope) -> bool:
    """Return whether a dataset contains a list that the rank fills with the output of its model."""
    names = {
        (dotted_key(part), where)
        for part, where in script.ingredients(data, scope, hops=4)
        if isinstance(part, (ast.Name, ast.Attribute))
    }
    return any(
        call.method in ("append", "extend")
        and call.receiver is not None
        and (dotted_key(call.receiver), where) in names
        and is_without_grad(script, call)
        for where in {where for _, where in names}
        for call in script.calls_in(where)
    )


def knows_rank(script: Script, node: ast.expr, scope: Scope) -> bool:
    """Return whether a value is computed from the rank or the number of ranks."""
    return any(
        script.is_kind(part, where, "rank", "world", "main")
        if isinstance(part, (ast.Name, ast.Attribute))
        else isinstance(part, ast.Constant) and part.value in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        for part, where in script.ingredients(node, scope, hops=4)
    )


def asks_for_rank(script: Script, owner: Scope) -> bool:
    """Return whether a class or one of its base classes mentions ranks."""
    family = [one for one in script.ancestors(owner) if isinstance(one, Scope)]
    return any(_DIVIDES.search(ast.unparse(one.node)) for one in family)


def is_for_evaluation(call: Call) -> bool:
    """Return whether the name given to a call's result suggests validation or testing."""
    parent: ast.AST | None = call.node
    while parent is not None and not isinstance(parent, ast.stmt):
        parent = call.module.parents.get(parent)
    targets = getattr(parent, "targets", None) or [getattr(parent, "target", None)]
    names = [name for one in targets if one is not None for name in _names(one)]
    names += _names(call.argument(0, "dataset"))
    return any(_EVALUATION.search(name) for name in [*names, call.scope.name])


def _names(node: ast.AST | None) -> list[str]:
    """Return the names, attributes, and strings in an expression."""
    parts = list(ast.walk(node)) if node is not None else []
    found = [getattr(one, "id", getattr(one, "attr", getattr(one, "value", None))) for one in parts]
    return [name for name in found if isinstance(name, str)]
