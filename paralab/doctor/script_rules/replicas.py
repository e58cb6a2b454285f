"""What makes the models of the ranks worse or different without DDP's doing: statistics, seeds,
first weights."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.registry import check
from paralab.doctor.script.agreement import is_collective, is_ddp_backward
from paralab.doctor.script.modules import batch_norms, kind, layers, wrappings
from paralab.doctor.script.naming import LOADER
from paralab.doctor.script.pointing import called, found, line_of, place
from paralab.doctor.script.questions import comes_from, loop_over, origins
from paralab.doctor.script.reading import Script
from paralab.doctor.script.settings import known_number
from paralab.doctor.script.values import Attr, Call, Entered, Made, Value

SMALL_BATCH = 16


@check("S09", source="script")
def batch_norm_of_small_batches(script: Script) -> Iterator[Finding]:
    if any(True for _ in script.calls_of("torch.nn.SyncBatchNorm.convert_sync_batchnorm")):
        return
    for wrapping, module in wrappings(script):
        norms = batch_norms(script, module)
        sizes = {
            int(size): loader
            for loader in _training_loaders(script)
            if (size := known_number(script, loader.argument(1, "batch_size")))
        }
        if not norms or not sizes or min(sizes) >= SMALL_BATCH:
            continue
        size, loader = min(sizes.items())
        why = (
            f"{kind(norms[0])} ({place(norms[0], wrapping)}) takes mean and variance of each rank's own batch, and a batch "
            f"has {size} samples ({place(loader, wrapping)}): noisy statistics, and only rank 0's are kept. One process with "
            "the whole batch would train better."
        )
        fix = (
            "model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP (GPUs only), or GroupNorm or LayerNorm, or "
            "larger batches."
        )
        yield found(script, "S09", "warning", wrapping, why, fix, also=(norms[0], loader))


def _training_loaders(script: Script) -> list[Call]:
    """The loaders of the loops in which a DDP model is trained."""
    loops = [
        loop
        for call in script.calls
        if is_ddp_backward(call) and (loop := loop_over(call, "loader"))
    ]
    made = (origin for loop in loops for origin in origins(loop.over))
    return list(
        dict.fromkeys(
            value.call for value in made if isinstance(value, Made) and value.call.target == LOADER
        )
    )


_RANDOM = (
    "torch.randn",
    "torch.rand",
    "torch.randint",
    "torch.bernoulli",
    "torch.normal",
    "random.",
    "numpy.random.",
    "torch.rand_like",
    "torch.randn_like",
)


@check("S10", source="script")
def same_seed_on_all_ranks(script: Script) -> Iterator[Finding]:
    seeds = list(script.calls_of("torch.manual_seed", "lightning.seed_everything"))
    if not wrappings(script) or not seeds or any(_has_rank(call) for call in seeds):
        return
    drawn = _drawn_in_training(script, seeds[0])
    if drawn is None:
        return
    why = (
        f"`{line_of(script, seeds[0])}` gives all ranks the same random numbers, so {drawn} the same on every rank: less "
        "variety per step than the ranks could give, with no message."
    )
    fix = "Seed with the rank (`torch.manual_seed(seed + rank)`); DDP makes the first weights equal by itself."
    yield found(script, "S10", "warning", seeds[0], why, fix)


def _has_rank(call: Call) -> bool:
    return any(comes_from(value, "rank") for value in (*call.args, *call.keywords.values()))


def _drawn_in_training(script: Script, at: Call) -> str | None:
    """What is drawn at random in training, in words: dropout in the model, noise in the data."""
    for _, module in wrappings(script):
        drops = [layer for layer in layers(script, module) if "Dropout" in kind(layer)]
        if drops:
            return f"{kind(drops[0])} ({place(drops[0], at)}) drops"
    for call in script.calls:
        if (
            call.target.startswith(_RANDOM)
            and not call.target.endswith(("seed", "default_rng"))
            and "generator" not in call.keywords
        ):
            getting = next(
                (c for c in call.inside(Entered) if c.function.name in ("__getitem__", "__iter__")),
                None,
            )
            if getting:
                return f"`{called(call)}` in {getting.function.name} ({place(call, at)}) draws"
        if call.target.startswith(
            (
                "torchvision.transforms.Random",
                "torchvision.transforms.v2.Random",
                "torchvision.transforms.ColorJitter",
            )
        ):
            return f"{called(call)} ({place(call, at)}) changes pictures"
    return None


@check("S11", source="script")
def own_first_weights(script: Script) -> Iterator[Finding]:
    if wrappings(script) or not any(
        True for _ in script.calls_of("torch.distributed.init_process_group")
    ):
        return
    reduces = [
        call
        for call in script.calls
        if is_collective(call) and call.args and _is_gradient(call.args[0])
    ]
    sends = [
        call
        for call in script.calls
        if call.target.startswith("torch.distributed.") and "broadcast" in call.method
    ]
    if not reduces or sends or any(True for _ in script.methods("load_state_dict")):
        return
    seeds = list(script.calls_of("torch.manual_seed"))
    if seeds and not _has_rank(seeds[0]):
        return  # what is built first is the same on all ranks; a seed with the rank may come after the model
    start = (
        f"the seed differs between ranks ({place(seeds[0], reduces[0])})"
        if seeds
        else "no seed is set"
    )
    why = (
        f"Gradients are averaged by hand in line {reduces[0].line}, but the ranks begin with different weights: {start}, and "
        "nothing sends rank 0's weights to the others. They never become equal."
    )
    fix = "Before training: for p in model.parameters(): dist.broadcast(p.detach(), src=0); the same for buffers."
    yield found(script, "S11", "error", reduces[0], why, fix)


def _is_gradient(value: Value) -> bool:
    return any(isinstance(origin, Attr) and origin.name == "grad" for origin in origins(value))
