"""How the job was put together: the same model everywhere, threads that fit the cores, wrapping in
the right order."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.agreement import found, listed, odd_one_out, place_of
from paralab.doctor.events import Threads, Wrap
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.registry import check


@check("L07", source="ranks")
def different_models(seen: Observation) -> Iterator[Finding]:
    """The models that ranks hand to DDP, parameter by parameter, in the order of wrapping."""
    wrapped = [
        [
            event
            for event in (*rank.events, *rank.doing)
            if isinstance(event, Wrap) and event.kind == "ddp"
        ]
        for rank in seen.ranks
    ]
    if len(seen.ranks) < 2:
        return
    for number, first in enumerate(wrapped[0]):
        others = [events[number] for events in wrapped if number < len(events)]
        if len(others) < len(seen.ranks) or (first.ranks and len(first.ranks) < seen.world):
            return
        models = {rank.rank: _model(wrap) for rank, wrap in zip(seen.ranks, others, strict=True)}
        if len(set(models.values())) == 1:
            continue
        odd = odd_one_out(models)
        rank = seen.ranks[0].rank if odd is None else next(rank for rank in models if rank != odd)
        other = (
            odd
            if odd is not None
            else next(r for r, model in models.items() if model != models[rank])
        )
        yield found(
            "L07",
            "error",
            f"ranks {rank} and {other} give different models to DDP: {_difference(models[rank], models[other], rank, other)}. "
            "DDP pairs "
            "parameters by their place, so nothing fits",
            "build the model from numbers that are the same on all ranks: broadcast the configuration (vocabulary, classes) "
            "from rank 0",
            place_of(others[[r.rank for r in seen.ranks].index(other)]),
            [
                f"rank {r}: {len(model)} parameters, {sum(_count(shape) for _, shape, _ in model):,} values"
                for r, model in models.items()
            ],
            odd,
        )
        return


Model = tuple[tuple[str, tuple[int, ...], bool], ...]


def _model(wrap: Wrap) -> Model:
    return tuple(
        (name, tuple(shape), on)
        for name, shape, on in zip(wrap.names, wrap.shapes, wrap.trainable, strict=True)
    )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _difference(one: Model, other: Model, rank: int, its: int) -> str:
    for (name, shape, on), (its_name, its_shape, its_on) in zip(one, other, strict=False):
        if (name, shape) != (its_name, its_shape):
            return f"{name} has the shape {list(shape)} on rank {rank}, {its_name} {list(its_shape)} on rank {its}"
        if on != its_on:
            trainable, frozen = (rank, its) if on else (its, rank)
            return f"{name} is trainable on rank {trainable} and frozen on rank {frozen}"
    more = [
        name
        for name, _, _ in (one if len(one) > len(other) else other)[min(len(one), len(other)) :]
    ]
    return f"{listed(more)} is there on rank {rank if len(one) > len(other) else its} only"


@check("L09", source="ranks")
def too_many_threads(seen: Observation) -> Iterator[Finding]:
    """The threads of all ranks of a machine against the cores that they share."""
    for host in dict.fromkeys(rank.start.host for rank in seen.ranks):
        ranks = [rank for rank in seen.ranks if rank.start.host == host]
        threads = [_threads(rank) for rank in ranks]
        cores = max(rank.start.cores for rank in ranks)
        if (
            len(ranks) < 2
            or sum(threads) <= cores
            or max(threads) == 1
            or any(rank.start.gpus for rank in ranks)
        ):
            continue
        share = max(1, cores // len(ranks))
        yield found(
            "L09",
            "warning",
            f"{len(ranks)} ranks compute with {threads[0]} threads each on {cores} cores of {host}: {sum(threads)} threads "
            "take turns, and "
            "every parallel loop waits for the slowest of them",
            f"torch.set_num_threads({share}) at the beginning of each rank, or OMP_NUM_THREADS={share} (torchrun sets 1)",
            None,
            [
                f"rank {rank.rank}: {count} threads"
                for rank, count in zip(ranks, threads, strict=True)
            ],
        )


def _threads(rank: RankSeen) -> int:
    last = rank.last(Threads)
    return last.threads if last else rank.start.threads
