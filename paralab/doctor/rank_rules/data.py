"""Who gets which samples, in which order, how many of them count, and how long one waits for
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from paralab.doctor.agreement import found, is_data_parallel, place_of, watched, wraps
from paralab.doctor.events import Backward, Batch, Epoch, Forward, Group, Loader, Pipeline, SetEpoch
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.place import Place
from paralab.doctor.registry import check

ENOUGH_BATCHES = 20  # before anything is said about waiting
LONG_WAIT = 0.3  # of the time between two batches


@dataclass
class Use:
    """One pass over a loader: its batches, and what the rank did with them."""

    loader: Loader
    batches: list[Batch] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    backwards: int = 0
    end: Epoch | None = None

    @property
    def trains(self) -> bool:
        return self.backwards > 0

    @property
    def evaluates(self) -> bool:
        return not self.backwards and any(not forward.grad for forward in self.forwards)

    @property
    def is_split_later(self) -> bool:
        """The model gets a part of each batch only: this rank's, of a batch that all have."""
        given, taken = (
            sum(forward.size or 0 for forward in self.forwards),
            sum(batch.size or 0 for batch in self.batches),
        )
        return 0 < given <= 0.75 * taken

    @property
    def rows(self) -> list[list[int]]:
        """Checksums of the rows of the batches that were looked at."""
        return [batch.rows for batch in self.batches if batch.rows]

    @property
    def place(self) -> Place | None:
        return self.loader.made_at or place_of(self.loader)


@lru_cache(maxsize=64)  # asked by many rules
def uses(rank: RankSeen) -> dict[tuple[int, int], Use]:
    """(loader, pass) -> what became of it; a pass inside another one (validation in the middle)
    takes nothing from it."""
    found_: dict[tuple[int, int], Use] = {}
    open_: list[Use] = []
    for event in rank.events:
        if isinstance(event, Loader):
            found_[event.loader, event.epoch] = use = Use(event)
            open_ = [other for other in open_ if other.loader.loader != event.loader] + [use]
        elif isinstance(event, Batch) and (event.loader, event.epoch) in found_:
            use = found_[event.loader, event.epoch]
            use.batches.append(event)
            open_ = [other for other in open_ if other is not use] + [use]
        elif isinstance(event, Epoch) and (event.loader, event.epoch) in found_:
            use = found_[event.loader, event.epoch]
            use.end = event
            open_ = [other for other in open_ if other is not use]
        elif isinstance(event, Forward) and open_:
            open_[-1].forwards.append(event)
        elif isinstance(event, Backward) and open_:
            open_[-1].backwards += 1
    return found_


# --- the same data on all ranks
# ------------------------------------------------------------------------------------------------


@check("T01", source="ranks")
def same_data(seen: Observation) -> Iterator[Finding]:
    yield from _shared(seen, "T01")


@check("T04", source="ranks")
def same_stream(seen: Observation) -> Iterator[Finding]:
    yield from _shared(seen, "T04")


def _shared(seen: Observation, entry: str) -> Iterator[Finding]:
    """T04 where the dataset is a stream, T01 where a sampler chooses."""
    if (
        not is_data_parallel(seen)
        or not watched(seen)
        or any(rank.of(Pipeline) for rank in seen.ranks)
    ):
        return
    of_ranks = [uses(rank) for rank in seen.ranks]
    told: set[int] = set()
    for key, use in of_ranks[0].items():
        others = [table[key] for table in of_ranks if key in table]
        if (
            key[0] in told
            or len(others) < len(seen.ranks)
            or use.loader.iterable is not (entry == "T04")
        ):
            continue
        if (
            use.evaluates
            or use.is_split_later
            or any(other.loader.made != use.loader.made for other in others)
        ):
            continue
        finding = _identical(seen, use, others) or _whole_dataset(seen, use, others)
        if finding is not None:
            told.add(key[0])
            yield finding


def _sure(seen: Observation, use: Use) -> tuple[Severity, str]:
    """Smaller groups, or models that are split over ranks, may rightly share data; so may batches
    that are not trained on."""
    if any(rank.of(Group) for rank in seen.ranks) or any(
        0 < len(wrap.ranks) < seen.world for wrap in wraps(seen.ranks[0])
    ):
        return (
            "suspect",
            ". Certain if every rank holds a whole model: ranks that share one model share its data",
        )
    if not use.trains:
        return "suspect", ". Certain if these batches are trained on"
    return "error", ""


def _identical(seen: Observation, use: Use, others: list[Use]) -> Finding | None:
    """The same rows in the same batches."""
    count = min(len(other.rows) for other in others)
    if (
        count < 2
        or any(other.rows[:count] != use.rows[:count] for other in others)
        or len({tuple(r) for r in use.rows[:count]}) < 2
    ):
        return None
    severity, unsure = _sure(seen, use)
    loader = use.loader
    evidence = [
        f"the first {count} batches that were looked at hold the same rows on all {len(others)} ranks"
    ]
    if loader.iterable:
        why = (
            f"every rank reads all of {loader.dataset}: its __iter__ does not ask which rank it is on, so all {seen.world} "
            "ranks train "
            f"on the same samples, and the work of {seen.world - 1} of them is for nothing{unsure}"
        )
        fix = "in __iter__ yield sample i only if i % world == rank; with workers: i % (world * workers) == rank * workers + worker"
        return found("T04", severity, why, fix, use.place, evidence)
    why = (
        f"this DataLoader chooses samples with {loader.sampler}, which knows nothing of ranks: all {seen.world} ranks train on "
        "the same "
        f"batches of {loader.batch_size}, and the average of equal gradients is what one rank alone would give{unsure}"
    )
    fix = "sampler=DistributedSampler(dataset) in the DataLoader instead of shuffle=, and sampler.set_epoch(epoch) before every epoch"
    return found("T01", severity, why, fix, use.place, evidence)


def _whole_dataset(seen: Observation, use: Use, others: list[Use]) -> Finding | None:
    """Every rank goes through all samples, each in an order of its own."""
    loader = use.loader
    if (
        loader.iterable
        or loader.replicas
        or not use.trains
        or not loader.samples
        or loader.sampler_samples != loader.samples
    ):
        return None
    first = {row for rows in use.rows for row in rows}
    common = [
        first.intersection(row for rows in other.rows for row in rows) for other in others[1:]
    ]
    if any(other.loader.samples != loader.samples for other in others) or not all(
        len(rows) > 1 for rows in common
    ):
        return None
    severity, unsure = _sure(seen, use)
    return found(
        "T01",
        "warning" if severity == "error" else severity,
        f"every one of the {seen.world} ranks goes through all {loader.samples} samples with a {loader.sampler} of its own: "
        "one epoch "
        f"is {seen.world} passes over the data, each sample is computed {seen.world} times, and nothing is gained by more "
        f"ranks{unsure}",
        "sampler=DistributedSampler(dataset) in the DataLoader instead of shuffle=True, and sampler.set_epoch(epoch) before "
        "every epoch",
        use.place,
        [
            f"len(sampler) = len(dataset) = {loader.samples} on every rank",
            f"{len(common[0])} of the rows seen are on both of two ranks",
        ],
    )


@check("T02", source="ranks")
def same_order(seen: Observation) -> Iterator[Finding]:
    """A DistributedSampler that shuffles gives the same order in two epochs."""
    for rank in seen.ranks:
        all_uses = uses(rank)
        for (loader, number), use in all_uses.items():
            before = all_uses.get((loader, number - 1))
            if (
                before is None
                or not use.trains
                or not use.loader.shuffle
                or use.loader.replicas is None
            ):
                continue
            if (
                use.loader.sampler_epoch != before.loader.sampler_epoch
                or use.loader.sampler_epoch is None
            ):
                continue
            if not use.rows or use.rows[0] != before.rows[0]:
                continue
            if len({event.epoch for event in rank.of(SetEpoch)}) > 1:
                continue  # a look at the first batch before the first epoch, or two passes in each, with one order on purpose
            yield found(
                "T02",
                "warning",
                f"passes {number - 1} and {number} over this loader give the same batches in the same order: the sampler "
                "shuffles with seed "
                f"+ epoch, and its epoch is {use.loader.sampler_epoch} in both, because nobody calls set_epoch",
                "sampler.set_epoch(epoch) before this loop, in every epoch",
                place_of(use.loader),
                [
                    f"rank {rank.rank}: the {len(use.rows[0])} rows of the first batch are the same in both passes"
                ],
            )
            return


@check("T05", source="ranks")
def counted_twice(seen: Observation) -> Iterator[Finding]:
    """Evaluation on more samples than there are."""
    if len(seen.ranks) < 2 or not watched(seen):
        return
    of_ranks = [uses(rank) for rank in seen.ranks]
    told: set[int] = set()
    for key, use in of_ranks[0].items():
        others = [table[key] for table in of_ranks if key in table]
        ends = [other.end.samples for other in others if other.end]
        total = use.loader.samples
        if (
            key[0] in told
            or len(ends) < len(seen.ranks)
            or not use.evaluates
            or not total
            or use.loader.replicas != len(seen.ranks)
        ):
            continue
        if not total < sum(ends) < total + len(seen.ranks):
            continue
        told.add(key[0])
        yield found(
            "T05",
            "suspect",
            f"the {len(seen.ranks)} ranks evaluate {sum(ends)} samples of a dataset of {total}: DistributedSampler repeats "
            f"{sum(ends) - total} so that all ranks get {ends[0]}, and those count twice in the result, which changes with the "
            "world size. Certain if they are not left out later",
            "evaluate Subset(dataset, range(rank, len(dataset), world)) without this sampler, and add up sums and true counts; "
            "or leave the "
            "repeated samples out of the sums",
            use.place,
            [
                f"rank {rank.rank}: {count} samples"
                for rank, count in zip(seen.ranks, ends, strict=True)
            ],
        )


# --- waiting for data
# ----------------------------------------------------------------------------------------------------------


@check("T06", source="ranks")
def workers_and_cores(seen: Observation) -> Iterator[Finding]:
    for host in dict.fromkeys(rank.start.host for rank in seen.ranks):
        ranks = [rank for rank in seen.ranks if rank.start.host == host]
        cores = max(rank.start.cores for rank in ranks)
        loaders = [
            max(rank.of(Loader), key=lambda loader: loader.workers, default=None) for rank in ranks
        ]
        workers = [loader.workers if loader else 0 for loader in loaders]
        if sum(workers) > cores and loaders[0] is not None:
            place = loaders[0].made_at or place_of(loaders[0])
            yield found(
                "T06",
                "warning",
                f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} with {workers[0]} workers each are {sum(workers)} loading "
                "processes, "
                f"beside the rank{'s' if len(ranks) > 1 else ''}, on {cores} cores of {host}: they take the cores from each "
                "other and "
                "from the training",
                f"num_workers={max(0, cores // len(ranks) - 1)} here: the cores of the machine divided by its ranks, less one",
                place,
                [
                    f"rank {rank.rank}: {count} workers"
                    for rank, count in zip(ranks, workers, strict=True)
                ],
            )
            return
    yield from _waiting(seen)


def _waiting(seen: Observation) -> Iterator[Finding]:
    """The rank that waits most for its batches."""
    shares = [
        (share, use)
        for rank in seen.ranks
        for use in uses(rank).values()
        if use.trains and (share := _share(use))
    ]
    if not shares:
        return
    share, use = max(shares, key=lambda pair: pair[0])
    if share < LONG_WAIT:
        return
    more = (
        "give it more workers"
        if use.loader.workers
        else f"num_workers is {use.loader.workers}: the rank itself loads"
    )
    yield found(
        "T06",
        "warning",
        f"{share:.0%} of the time of this loop is spent waiting for the next batch ({more})",
        "num_workers=2 or more (at most cores / ranks - 1), pin_memory=True on GPUs, lighter transforms, or data prepared "
        "beforehand",
        use.place,
        [
            f"{len(use.batches)} batches, {sum(batch.wait for batch in use.batches):.2f} s of waiting"
        ],
        gain=share,
    )


def _share(use: Use) -> float | None:
    batches = use.batches[1:]  # the first one starts the workers
    if len(batches) < ENOUGH_BATCHES:
        return None
    seconds = batches[-1].t - use.batches[0].t
    return sum(batch.wait for batch in batches) / seconds if seconds > 0 else None
