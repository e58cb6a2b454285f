"""Data: does every rank get its own part, in another order every epoch, and is every sample
evaluated once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.finding import Edit, Finding
from paralab.doctor.registry import check
from paralab.doctor.script.editing import swapped
from paralab.doctor.script.feeding import content, loaders_of, may_be
from paralab.doctor.script.naming import LOADER, SAMPLER
from paralab.doctor.script.pointing import found, short
from paralab.doctor.script.questions import (
    comes_from,
    depends_on_rank,
    is_forward,
    iterated,
    origins,
    rank_branch,
    roles,
    under,
)
from paralab.doctor.script.reading import Script
from paralab.doctor.script.remembering import remembered
from paralab.doctor.script.turns import length
from paralab.doctor.script.updates import Backward, backwards
from paralab.doctor.script.values import (
    Attr,
    Call,
    Class,
    Computed,
    Constant,
    Entered,
    Happening,
    Loop,
    Made,
    Object,
    Value,
    options,
)

_SEEDS = ("torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed_all")
_RANDOM = ("torch.randn", "torch.rand", "torch.randint", "torch.normal", "torch.randperm")


@dataclass(frozen=True, eq=False)
class Trained:
    """A loader, and a backward through a DDP model that its batches lead to."""

    loader: Call
    backward: Backward

    @property
    def dataset(self) -> Value | None:
        return self.loader.argument(0, "dataset")

    @property
    def samplers(self) -> list[Call]:
        given = self.loader.argument(3, "sampler")
        return (
            [
                way.call
                for way in options(given)
                if isinstance(way, Made) and way.call.target == SAMPLER
            ]
            if given
            else []
        )

    @property
    def loop(self) -> Loop | None:
        """The loop over the loader."""
        made = self.loader.result
        return next(
            (
                loop
                for loop in self.backward.call.inside(Loop)
                if any(made is over for over in iterated(loop))
            ),
            None,
        )


@remembered
def _trained(script: Script) -> list[Trained]:
    """Each loader once."""
    found: dict[int, Trained] = {}
    for backward in backwards(script):
        for loader in loaders_of(backward.wrapped) if rank_branch(backward.call) is None else ():
            found.setdefault(id(loader), Trained(loader, backward))
    return list(found.values())


def _is_nothing(value: Value | None) -> bool:
    return value is None or (isinstance(value, Constant) and value.value is None)


# --- T01: every rank reads all of it; T04: a stream that is not split
# ------------------------------------------------------------


@check("T01", source="script")
def every_rank_reads_everything(script: Script) -> Iterator[Finding]:
    for trained in _trained(script):
        loader, dataset = trained.loader, trained.dataset
        if not _is_nothing(loader.argument(3, "sampler")) or not _is_nothing(
            loader.argument(4, "batch_sampler")
        ):
            continue
        if dataset is None or "**" in loader.keywords or "iterable dataset" in roles(dataset):
            continue
        if (
            _is_split(script, dataset)
            or _is_split_later(trained)
            or _differs_by_chance(script, dataset)
        ):
            continue
        known = "dataset" in roles(dataset)
        shuffled = loader.argument(2, "shuffle")
        mixed = isinstance(shuffled, Constant) and shuffled.value is True
        name = (
            short(loader.node.args[0])
            if isinstance(loader.node, ast.Call) and loader.node.args
            else "the dataset"
        )
        why = (
            f"No sampler: every rank goes through all of `{name}`"
            + (
                " in a random order of its own: an epoch is as many passes as there are ranks."
                if mixed
                else " in the same order."
            )
            + (
                ""
                if mixed
                else " All ranks compute the same gradients, and the job does no more than one process would."
            )
        )
        if not known:
            why += " Certain if the dataset does not split itself by rank."
        fix = f"`sampler=DistributedSampler({name})` (without `shuffle`), and `sampler.set_epoch(epoch)` in the epoch loop."
        severity = "suspect" if not known else "warning" if mixed else "error"
        yield found(script, "T01", severity, loader, why, fix, also=(trained.backward.call,))  # type: ignore[arg-type]


@check("T01", source="script")
def shares_of_another_order(script: Script) -> Iterator[Finding]:
    """The shares of a DistributedSampler fit together only if all ranks shuffle alike."""
    for sampler in script.calls_of(SAMPLER):
        seed, shuffle = sampler.argument(4, "seed"), sampler.argument(3, "shuffle")
        if (
            seed is None
            or not _holds_the_rank(seed)
            or (isinstance(shuffle, Constant) and not shuffle.value)
        ):
            continue
        why = (
            "The seed holds the rank, so every rank shuffles in an order of its own and takes its share of that: in an epoch some "
            "samples come on several ranks, others on none."
        )
        yield found(
            script,
            "T01",
            "error",
            sampler,
            why,
            "Give all ranks the same seed; `set_epoch` changes the order.",
        )


def _holds_the_rank(seed: Value) -> bool:
    """`17 + rank`. Not where the rank may be taken out of a seed that holds it:
    `torch.initial_seed() - rank`."""
    taken_out = any(isinstance(origin, Computed) and origin.op == "Sub" for origin in origins(seed))
    return comes_from(seed, "rank") and not taken_out


def _is_split(script: Script, dataset: Value) -> bool:
    """Made with the rank or the number of ranks, or by a class that asks for them."""
    parts = list(content(dataset))
    if any(roles(part) & {"rank", "world"} for part in parts):
        return True
    objects = {id(part): part for part in parts if isinstance(part, Object)}
    if any(_asks_for_rank(script, part.of) for part in objects.values()):
        return True
    return any(
        any(id(way) in objects for way in options(store.base))
        and (comes_from(store.value, "rank") or comes_from(store.value, "world"))
        for store in script.stores
    )


def _asks_for_rank(script: Script, of: Class) -> bool:
    family = [of, *(base for base in of.bases if isinstance(base, Class))]
    for call in script.calls:
        inside = (context.function.of_class for context in call.inside(Entered))
        if roles(call.result) & {"rank", "world"} and any(one in family for one in inside):
            return True
    text = " ".join(ast.unparse(one.node) for one in family).lower()
    return any(word in text for word in ("rank", "world_size", "num_replicas", "num_shards"))


def _is_split_later(trained: Trained) -> bool:
    """Each rank takes its part of every batch."""
    given = [
        value
        for call in trained.backward.wrapped
        for value in (*call.args, *call.keywords.values())
    ]
    return any(roles(part) & {"rank", "world"} for value in given for part in content(value))


def _differs_by_chance(script: Script, dataset: Value) -> bool:
    """Random numbers made here, with a seed that differs between ranks."""
    drawn = [
        part.call
        for part in content(dataset)
        if isinstance(part, Made) and part.call.target in _RANDOM
    ]
    for call in drawn:
        if "generator" in call.keywords:
            continue
        seeds = [seed for seed in script.calls_of(*_SEEDS) if seed.number < call.number]
        if (
            not seeds
            or depends_on_rank(seeds[-1].argument(0, "seed"))
            or comes_from(seeds[-1].argument(0, "seed"), "rank")
        ):
            return True
    return False


@check("T04", source="script")
def stream_that_is_not_split(script: Script) -> Iterator[Finding]:
    for trained in _trained(script):
        stream = next(
            (
                way
                for way in options(trained.dataset or Value())
                if "iterable dataset" in roles(way)
            ),
            None,
        )
        if not isinstance(stream, Object) or _is_split(script, stream) or _is_split_later(trained):
            continue
        method = _iter_of(stream.of)
        if method is None:
            continue
        at = Happening(trained.loader.number, method, stream.of.scope.file, ())
        name = stream.of.node.name
        why = (
            f"`{name}.__iter__` asks neither for the rank nor for the number of ranks, and an IterableDataset has no sampler: "
            f"every rank that iterates the loader of line {trained.loader.line} gets the same samples."
        )
        fix = (
            "Give out only every n-th sample: with r = rank · workers + worker and n = ranks · workers, those with `i % n == r` "
            "(`dist.get_rank()`, `torch.utils.data.get_worker_info()`)."
        )
        yield found(script, "T04", "error", at, why, fix, also=(trained.loader,))


def _iter_of(of: Class) -> ast.FunctionDef | None:
    for one in (of, *(base for base in of.bases if isinstance(base, Class))):
        for statement in one.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__iter__":
                return statement
    return None


# --- T02: the same order every epoch; T03: two orders at once
# --------------------------------------------------------------------


def _is_false(value: Value | None) -> bool:
    return isinstance(value, Constant) and value.value is False


@check("T03", source="script")
def shuffle_beside_a_sampler(script: Script) -> Iterator[Finding]:
    for loader in script.calls_of(LOADER):
        sampler, shuffle = loader.argument(3, "sampler"), loader.argument(2, "shuffle")
        if sampler is None or not (isinstance(shuffle, Constant) and shuffle.value is True):
            continue
        if not any("sampler" in role for way in options(sampler) for role in roles(way)):
            continue
        why = "A sampler decides the order, and `shuffle=True` wants to decide it too: DataLoader refuses with a ValueError."
        fix = "Leave `shuffle` out: the sampler decides. Where there may be none: `shuffle=(sampler is None)`."
        yield found(script, "T03", "error", loader, why, fix, edits=_unshuffled(script, loader))


def _unshuffled(script: Script, loader: Call) -> tuple[Edit, ...]:
    node = loader.node
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        if keyword.arg == "shuffle" and isinstance(keyword.value, ast.Constant):
            return swapped(script, loader.file, keyword.value, "False")
    return ()


# --- T05: samples that are evaluated twice
# ---------------------------------------------------------------------------------------


@check("T05", source="script")
def padding_in_evaluation(script: Script) -> Iterator[Finding]:
    trained = {id(one.loader) for one in _trained(script)}
    for loader in script.calls_of(LOADER):
        sampler = next(
            (
                way
                for way in options(loader.argument(3, "sampler") or Value())
                if isinstance(way, Made)
            ),
            None,
        )
        if (
            id(loader) in trained
            or sampler is None
            or sampler.call.target != SAMPLER
            or not _is_evaluated(script, loader)
        ):
            continue
        dropped, dataset = sampler.call.argument(5, "drop_last"), loader.argument(0, "dataset")
        if (dropped is not None and not _is_false(dropped)) or _counts_samples(
            script, loader, dataset
        ):
            continue
        samples = length(dataset)
        if samples is not None and samples % 8 == 0:
            continue
        odd = samples is not None and samples % 2
        why = "DistributedSampler gives every rank equally many samples, and repeats some where they do not suffice: "
        if odd:
            why += f"of {samples} samples two ranks evaluate {(samples or 0) + 1}, and one counts twice in the result."
        else:
            why += "they count twice in the result. Certain if the number of samples is not a multiple of the number of ranks."
        fix = "Split without padding, `Subset(dataset, range(rank, len(dataset), world))`, or leave the repeated ones out."
        yield found(
            script, "T05", "warning" if odd else "suspect", loader, why, fix, also=(sampler.call,)
        )


def _is_evaluated(script: Script, loader: Call) -> bool:
    """A model is called on its batches without gradients, and no backward follows."""
    passes = (
        call
        for call in script.calls
        if (is_forward(call) or _is_inner(call)) and under(call, "no_grad")
    )
    return any(loader in loaders_of([call]) for call in passes)


def _is_inner(call: Call) -> bool:
    """`ddp.module(x)`"""
    return call.method == "module" and bool(roles(call.receiver) & {"ddp", "dp"})


def _counts_samples(script: Script, loader: Call, dataset: Value | None) -> bool:
    """`len(dataset)` is asked for: the result may be corrected by it."""
    for call in script.calls_of("builtins.len"):
        for way in options(call.args[0]) if call.args else ():
            if (dataset is not None and may_be(dataset, way)) or (
                isinstance(way, Attr) and may_be(way.base, loader.result)
            ):
                return True
    return False
