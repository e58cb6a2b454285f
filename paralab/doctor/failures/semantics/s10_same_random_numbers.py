"""S10: Every rank draws the same random numbers.

Symptom: No error. Dropout masks and augmentations are the same on all ranks, so each step sees less variety.
Cause: Every rank passes the same number to torch.manual_seed, and loader workers derive their seeds from it.
Fix: After building the model, seed with the rank: `torch.manual_seed(seed + rank)`.
Reported: huggingface/transformers#37932 nnaisense/bayesian-flow-networks#3
huggingface/pytorch-image-models#1519 pytorch/pytorch#3880

  torch.manual_seed(42)
  model = DistributedDataParallel(Net())
+ torch.manual_seed(42 + dist.get_rank())
"""

import ast
import re

from paralab.doctor.events import Forward, Loader, Seed
from paralab.doctor.failures.semantics.order import ways
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.rank_checks import ddp_wraps, is_data_parallel, make_finding, watched
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.facts import Call
from paralab.doctor.static.hints import is_in_training, is_parallel, words_of_project
from paralab.doctor.static.models import is_decided, layers, wraps
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.units import plural

ENTRY = describe(__doc__, silent=True)
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_seed", "seed_everything", "fix_seed")  # fmt: skip
_DRAWS = (
    "torch.rand", "torch.randn", "torch.randint", "torch.bernoulli", "torch.normal", "random.",
    "numpy.random.", "torch.randperm",
)  # fmt: skip
# torch.manual_seed does not affect an object with a seed of its own.
_OWN_GENERATOR = re.compile(r"random\.(Random|SystemRandom|RandomState|Generator|default_rng)\.")
_TRANSFORMS = ("Random", "ColorJitter", "AutoAugment", "TrivialAugment", "AugMix")


_SETS = re.compile(r"seed", re.I)
_WORKER = re.compile(r"worker_?init|init_?worker|seed_?worker|worker_?seed", re.I)
_DIVIDES = re.compile(r"rank|num_replicas|world_size|num_shards", re.I)
_OF_RANK = re.compile(r"rank|initial_seed|info(\(\))?\.seed|urandom|time", re.I)


@check("S10", source="script")
def same_seed(script: Script) -> Findings:
    """Report a seed that does not depend on the rank, if the model or the data draws random
    numbers."""
    sure = list(_same_seed(script))
    yield from sure or _by_name(script)


def _by_name(script: Script) -> Findings:
    """Flag a seed in a parallel project in which no seed mentions the rank."""
    words = words_of_project(script)
    calls = [call for call in script.methods(*_SEEDS) if call.scope.is_function]
    calls = [
        call for call in calls if call.target.startswith(("torch.", "numpy.random", "random."))
    ]
    with_rank = any("seed" in word for word in words)
    for call in calls if is_parallel(script) else ():
        if call.module is not script.modules[0]:
            continue
        worker = bool(_WORKER.search(call.scope.name))
        if with_rank and not worker:
            continue
        if _OF_RANK.search(ast.unparse(call.scope.node)) or not (
            worker or _SETS.search(call.scope.name)
        ):
            continue
        who = "workers" if worker else "ranks"
        why = f"`{code(call.node)}` does not depend on the rank, so all {who} draw the same random numbers."
        yield found(script, "S10", "suspect", call, why, doubt="if the data or dropout uses them")
        return


def _same_seed(script: Script) -> Findings:
    seeds = script.calls_of("torch.manual_seed", "lightning.seed_everything")
    every = [value for call in script.methods(*_SEEDS) for value in _seed_arguments(call)]
    if not seeds or not wraps(script) or any(script.nature(*one) == "rank" for one in every):
        return
    spawned = [scope for scope in script.scopes if scope.is_function and script.is_spawned(scope)]
    seeds = [
        seed
        for seed in seeds
        if not spawned or any(way[-1][0] in spawned for way in ways(script, seed.node, seed.scope))
    ]
    seeds = [seed for seed in seeds if not _evaluates(script, seed.scope)]
    if not seeds:
        return  # they seed an evaluation, or a parent process whose state ranks do not inherit
    seed = seeds[0]
    drawn = _drawn_in_training(script, seed)
    if drawn is None:
        return
    what, draws = drawn
    same = all(script.nature(*value) == "same" for value in _seed_arguments(seed))
    scopes = [scope for way in ways(script, seed.node, seed.scope) for scope, _ in way]
    trains = any(is_in_training(script, scope) for scope in scopes)
    sure = same and draws and trains and _runs(script, seed)
    why = (
        f"`{code(seed.node)}` gives every rank the same random numbers, so {what} on "
        "every rank. Each step sees less variety than intended."
    )
    doubt = "" if sure else "if this line runs with the same number on every rank"
    yield found(script, "S10", "warning", seed, why, doubt=doubt)


def _seed_arguments(call: Call) -> list[tuple[ast.expr, Scope]]:
    return [(one, call.scope) for one in call.arguments]


def _evaluates(script: Script, scope: Scope) -> bool:
    """Return whether a function only evaluates: it calls `model.eval()` and never `train()`."""
    names = {call.method for call in script.reached(scope)}
    return "eval" in names and names.isdisjoint({"train", "backward"})


def _runs(script: Script, call: Call, depth: int = 4) -> bool:
    """Return whether all enclosing conditions of a call are known, including those in its
    callers."""
    if not is_decided(script, call):
        return False
    callers = script.callers(call.scope) if call.scope.is_function and depth else []
    return not callers or any(_runs(script, caller, depth - 1) for caller in callers)


def _drawn_in_training(script: Script, seed: Call) -> tuple[str, bool] | None:
    """Describe what training draws at random, and return whether that is certain."""
    for wrap in wraps(script):
        for layer in layers(script, wrap.argument(0, "module"), wrap.scope):
            if layer is not None and "Dropout" in layer.target:
                given = layer.argument(0, "p")
                share = 0.5 if given is None else script.evaluate(given, layer.scope, 0)
                if share != 0:
                    what = f"{layer.last_name} ({line_of(layer, seed)}) drops the same values"
                    return what, isinstance(share, float)
    for call in script.calls:
        if call.target.startswith("torchvision.transforms") and call.last_name.startswith(
            _TRANSFORMS
        ):
            return f"{call.last_name} ({line_of(call, seed)}) changes images the same way", True
        if (
            call.scope.name in ("__getitem__", "__iter__")
            and call.target.startswith(_DRAWS)
            and (call.target.startswith("torch.") or script.methods("seed"))
            and not call.method.endswith(("seed", "default_rng"))
            and not _OWN_GENERATOR.search(call.target)
            and call.argument(99, "generator") is None
            and not _orders_for_all(script, call.scope)
        ):
            return f"`{code(call.node.func)}` ({line_of(call, seed)}) draws the same numbers", True
    return None


def _orders_for_all(script: Script, scope: Scope) -> bool:
    """Return whether a sampler orders the samples before a sampler divides them by rank: then all
    ranks need the same order."""
    bases = ("Sampler", "BatchSampler", "DistributedSampler")
    owner = scope.class_around
    if owner is None or not script.is_a(owner, *bases):
        return False
    samplers = [one for one in script.scopes if one.is_class and script.is_a(one, *bases)]
    return any(_DIVIDES.search(ast.unparse(one.node)) for one in samplers)


@check("S10", source="ranks")
def same_streams(seen: Observation) -> Findings:
    if not is_data_parallel(seen) or not watched(seen):
        return
    states = [_states(rank) for rank in seen.ranks]
    common = sorted(set.intersection(*map(set, states)))
    equal = [number for number in common if len({each[number] for each in states}) == 1]
    if len(equal) < 2 or len(equal) < len(common):
        return
    rank = seen.ranks[0]
    dropouts = max((wrap.dropouts for wrap in ddp_wraps(rank)), default=0)
    drawn = [n for n in equal if n - 1 in equal and states[0][n] != states[0][n - 1]]
    if not dropouts and not any(_inside_a_pass(rank, number) for number in drawn):
        return  # nothing draws random numbers while training
    first = rank.of(Forward)[equal[0]]
    seed = next((event for event in reversed(rank.of(Seed)) if event.t < first.t), None)
    what = plural(dropouts, "dropout layer") if dropouts else "random numbers between passes"
    why = (
        f"Every rank uses {f'torch.manual_seed({seed.seed})' if seed else 'the same seed'}, so all "
        f"{len(seen.ranks)} random generators are in the same state in every pass. Every rank makes "
        f"the same random choices ({what})."
    )
    doubt = "" if dropouts else "unless they are meant to be equal"
    yield make_finding("S10", "warning", why, seed or first, doubt=doubt)


def _states(rank: WatchedRank) -> dict[int, int]:
    """Return the generator's state at each training forward, indexed by the forward's number."""
    return {
        number: forward.random
        for number, forward in enumerate(rank.of(Forward))
        if forward.random is not None and forward.training and forward.grad
    }


def _inside_a_pass(rank: WatchedRank, number: int) -> bool:
    """Return False if a pass over a loader began right before this forward: starting a pass draws a
    random number."""
    before, after = rank.of(Forward)[number - 1 : number + 1]
    return not any(before.t < event.t < after.t for event in rank.of(Loader))
