"""Pipeline schedules: batches that do not divide into micro-batches, and a pipeline of one
micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.agreement import found, place_of
from paralab.doctor.events import Pipeline
from paralab.doctor.failures.hangs.failed_ranks import is_uneven
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.registry import check


def parts(batch: int, microbatches: int) -> list[int]:
    """As the schedule splits: the first ones get one more. 10 in 4 parts: 3 3 2 2; 7 in 4: 2 2 2
    1."""
    small, larger = divmod(batch, microbatches)
    return [small + 1] * larger + [small] * (microbatches - larger)


def _uneven(seen: Observation) -> Iterator[tuple[RankSeen, Pipeline, list[int]]]:
    """The steps with a batch that gives parts of different sizes, also one that never came to its
    end."""
    for rank in seen.ranks:
        for event in (*rank.story, *rank.doing):
            if isinstance(event, Pipeline) and event.size and is_uneven(event):
                yield rank, event, parts(event.size, event.microbatches)


def _finding(entry: str, rank: RankSeen, event: Pipeline, why: str) -> Finding:
    needed = event.microbatches
    fix = (
        f"a batch that is a multiple of {needed} (or another number of micro-batches), and drop_last=True in the DataLoader "
        "for its last "
        "one"
    )
    evidence = [
        f"rank {rank.rank}, stage {event.stage} of {event.stages}: batch {event.size}, {needed} micro-batches"
    ]
    if event.error:
        evidence.append(event.error.splitlines()[0][:160])
    return found(entry, "error", why, fix, place_of(event), evidence)


@check("P01", source="ranks")
def indivisible(seen: Observation) -> Iterator[Finding]:
    for rank, event, sizes in _uneven(seen):
        if min(sizes) > 1:
            why = (
                f"a batch of {event.size} in {event.microbatches} micro-batches is cut into {', '.join(map(str, sizes))}; the "
                "stages expect "
                f"the size of the first, {sizes[0]}, in all of them, and fail at the others"
            )
            yield _finding("P01", rank, event, why)
            return


@check("P02", source="ranks")
def too_small(seen: Observation) -> Iterator[Finding]:
    for rank, event, _ in _uneven(seen):
        if event.size and event.size < event.microbatches:
            why = (
                f"a batch of {event.size} cannot be cut into {event.microbatches} micro-batches; each stage fails in its own "
                "way, and the "
                "messages of the others do not say so"
            )
            yield _finding("P02", rank, event, why)
            return


@check("P04", source="ranks")
def one_row(seen: Observation) -> Iterator[Finding]:
    for rank, event, sizes in _uneven(seen):
        if min(sizes) == 1:
            why = (
                f"a batch of {event.size} in {event.microbatches} micro-batches is cut into {', '.join(map(str, sizes))}: "
                f"where {sizes[0]} "
                "rows are expected and one comes, the loss stretches the one to fit, without an error at the last stage, and "
                "the gradients "
                "no longer fit at the stages before it"
            )
            yield _finding("P04", rank, event, why)
            return


@check("P05", source="ranks")
def single_microbatch(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        for event in (*rank.story, *rank.doing):
            if isinstance(event, Pipeline) and event.microbatches == 1 and event.stages > 1:
                idle = (event.stages - 1) / event.stages
                yield found(
                    "P05",
                    "warning",
                    f"one micro-batch goes through {event.stages} stages one after the other: only one stage works at any "
                    "time, and each "
                    f"idles for {idle:.0%} of the step",
                    f"at least {4 * event.stages} micro-batches: {event.schedule}(stage, n_microbatches={4 * event.stages}, …)",
                    event.made_at or place_of(event),
                    [
                        f"idle share (stages - 1) / (micro-batches + stages - 1) = {event.stages - 1}/{event.stages}"
                    ],
                    gain=idle - (event.stages - 1) / (5 * event.stages - 1),
                )
                return
