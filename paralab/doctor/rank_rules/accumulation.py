"""Gradient accumulation: what several passes give to one step, and what the step does not get."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.agreement import found, place_of, watched, wraps
from paralab.doctor.events import Backward, Epoch, Loader, Scheduled, Step, ZeroGrad
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.registry import check
from paralab.doctor.windows import MicroStep, Window, accumulated

CLOSE = 1e-3
SPREAD = 1.5  # the most tokens of a micro-batch against the fewest, from which on it matters


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))


@check("G01", source="ranks")
def undivided(seen: Observation) -> Iterator[Finding]:
    """The loss as its function gave it went into backward, several times for one step."""
    for rank in seen.ranks:
        plain = [window for window in accumulated(rank) if _is_plain_sum(window)]
        if not plain:
            continue
        checked = [_gradient_was_rescaled(window) for window in plain]
        if any(checked):
            return
        window = plain[0]
        count = len(window.micro_steps)
        from_data = all(one.batches for one in window.micro_steps)
        certain = from_data and False in checked
        unsure = (
            ""
            if certain
            else f". Certain if the {count} losses are of {count} parts of one batch, and gradients are not divided later"
        )
        losses = [
            f"{one.loss_value:.4g} -> backward of {one.backward.loss:.4g}"
            for one in window.micro_steps[:4]
        ]
        yield found(
            "G01",
            "error" if certain else "suspect",
            f"{count} backward passes are added up for one optimizer step, each from a mean loss that was not divided by "
            f"{count}: the "
            f"gradient is {count} times that of one batch of the same {count} parts{unsure}",
            f"(loss / {count}).backward(), with the number of micro-batches in place of {count}",
            place_of(window.micro_steps[0].backward),
            [
                f"{len(plain)} of {len(list(accumulated(rank)))} windows of rank {rank.rank}",
                f"losses: {'; '.join(losses)}",
            ],
        )
        return


def _is_plain_sum(window: Window) -> bool:
    return all(
        one.factor is not None
        and _close(one.factor, 1.0)
        and {loss.reduction for loss in one.losses if loss.grad} == {"mean"}
        for one in window.micro_steps
    )


def _gradient_was_rescaled(window: Window) -> bool | None:
    """Between the last backward and the step somebody divided the gradients; None where that was
    not looked at."""
    last = window.micro_steps[-1]
    after = window.clips[0].norm if window.clips else _norm(window.step)
    if last.backward.grad_norm is None or after is None or not last.scale:
        return None
    before = last.backward.grad_norm
    return not any(_close(before / scale, after) for scale in (1.0, last.scale))


def _norm(step: Step | None) -> float | None:
    norms = [value[0] for value in (step.gradients if step and step.gradients else []) if value]
    return sum(norm * norm for norm in norms) ** 0.5 if norms and min(norms) >= 0 else None


def _reduces(one: MicroStep) -> bool:
    """The gradients went over the wire in this pass."""
    return bool(one.backward.seq and one.backward.seq[1] >= one.backward.seq[0])


@check("G02", source="ranks")
def synced_every_time(seen: Observation) -> Iterator[Finding]:
    """The gradients are averaged in every micro-batch, which one would do for."""
    yield from _needless(seen, "G02")


@check("G03", source="ranks")
def context_around_backward(seen: Observation) -> Iterator[Finding]:
    """The same, although no_sync is there: around the backward alone."""
    yield from _needless(seen, "G03")


def _needless(seen: Observation, entry: str) -> Iterator[Finding]:
    for rank in seen.ranks if seen.world > 1 else []:
        if not wraps(rank):
            continue
        all_windows = list(accumulated(rank))
        wasteful = [window for window in all_windows if sum(map(_reduces, window.micro_steps)) > 1]
        if not wasteful or 2 * len(wasteful) < len(all_windows):
            continue
        window = wasteful[-1]  # in the first pass DDP also shares its buckets
        early = window.micro_steps[:-1]
        count = len(window.micro_steps)
        inside = [
            one
            for one in early
            if one.backward.unsynced and any(forward.sync for forward in one.forwards)
        ]
        if (entry == "G03") is not bool(inside):
            return
        seconds = sum(one.backward.seconds or 0.0 for one in early if _reduces(one))
        evidence = [
            f"{sum(map(_reduces, window.micro_steps))} of {count} backward passes of a step made collectives",
            f"backward passes that need not: {seconds * 1000:.1f} ms per step",
        ]
        if entry == "G03":
            forward = inside[0].forwards[-1]
            yield found(
                "G03",
                "warning",
                f"this backward is inside no_sync(), but its forward at {forward.site} is not, and DDP decides at the forward: all "
                f"{count} micro-batches of a step still average their gradients",
                "put the forward into the no_sync() block as well",
                place_of(inside[0].backward),
                evidence,
            )
            return
        yield found(
            "G02",
            "warning",
            f"{count} micro-batches make one optimizer step, and each of them averages all gradients between the ranks: once, "
            "in the "
            f"last, is enough, so {count - 1} of {count} reductions are wasted",
            "with model.no_sync(): around forward and backward of all micro-batches but the last",
            place_of(early[0].backward),
            evidence,
        )
        return


@check("G06", source="ranks")
def left_over(seen: Observation) -> Iterator[Finding]:
    """The loader ends inside a window: its gradients wait for the next epoch, or are thrown
    away."""
    for rank in seen.ranks:
        sizes = [len(window.micro_steps) for window in accumulated(rank)]
        if not sizes:
            continue
        usual = max(set(sizes), key=sizes.count)
        for epoch, count, fate in _leftovers(rank, usual):
            step = next((step for step in reversed(rank.steps) if step.t < epoch.t), None)
            if step is None or not fate:
                continue
            leaks = fate == "leak"
            then = (
                f"they stay in the gradients and are added to the first step of the next pass, which gets {count} too many"
                if leaks
                else "they never reach a step"
            )
            yield found(
                "G06",
                "error" if leaks else "warning",
                f"{usual} micro-batches make one step, and a pass over the loader has {epoch.batches}: after its last step {count} "
                f"backward passes are left over, and {then}",
                "also step after the last batch of the loader (or i + 1 == len(loader)), with the loss divided by the true "
                "count of its "
                "micro-batches; or drop_last and a number of batches that is a multiple",
                place_of(step),
                [
                    f"rank {rank.rank}: {epoch.batches} batches, {count} passes after the last step of pass {epoch.epoch}"
                ],
            )
            return


def _leftovers(rank: RankSeen, usual: int) -> Iterator[tuple[Epoch, int, str | None]]:
    """(the end of a pass over a loader, backward passes since the last step, what became of
    them)."""
    inside: dict[int, int] = {}  # loader -> backward passes of this pass over it
    pending = 0
    for place, event in enumerate(rank.events):
        if isinstance(event, Loader):
            inside[event.loader] = 0
        elif isinstance(event, Backward):
            pending += 1
            inside = {loader: count + 1 for loader, count in inside.items()}
        elif isinstance(event, (Step, ZeroGrad)):
            pending = 0
        elif (
            isinstance(event, Epoch)
            and pending
            and inside.get(event.loader, 0) >= event.batches > 0
        ):
            yield event, pending, _fate(rank, place, pending, usual)


def _fate(rank: RankSeen, place: int, pending: int, usual: int) -> str | None:
    """None: they became part of a window of the usual length, which goes on over the end of the
    pass; or it is not known."""
    more = 0
    for event in rank.events[place:]:
        if isinstance(event, Backward):
            more += 1
        elif isinstance(event, ZeroGrad):
            return "dropped"
        elif isinstance(event, Step):
            return "leak" if more and pending + more != usual else None
    if more:
        return "leak" if pending + more > usual else None
    return "dropped" if rank.came_to_its_end and not rank.raised else None


@check("G07", source="ranks")
def ragged(seen: Observation) -> Iterator[Finding]:
    """Micro-batches of different sizes count the same in the sum."""
    for rank in seen.ranks:
        for window in accumulated(rank):
            sizes = [one.size for one in window.micro_steps]
            if (
                None in sizes
                or len(set(sizes)) < 2
                or not _are_means(window)
                or _weighted_by(window, sizes)
            ):
                continue
            small = min(size for size in sizes if size is not None)
            share = f"{sum(size or 0 for size in sizes) / len(sizes) / small:.2f}"
            yield found(
                "G07",
                "warning",
                f"one step adds up micro-batches of {', '.join(map(str, sizes))} samples, each as the mean of its own samples: "
                "a sample "
                f"in the batch of {small} counts {share} times as much as it should",
                "drop_last=True in the DataLoader, or weight each loss by its share: loss * len(batch) / samples_of_the_window",
                place_of(window.micro_steps[0].backward),
                [
                    f"rank {rank.rank}, step {window.step.number if window.step else '?'}: sizes {sizes}"
                ],
            )
            return


def _are_means(window: Window) -> bool:
    return all(
        {loss.reduction for loss in one.losses if loss.grad} == {"mean"}
        for one in window.micro_steps
    )


def _weighted_by(window: Window, counts: list[int | None]) -> bool:
    """The user has given each micro-batch its weight (or we cannot tell)."""
    factors = [one.factor for one in window.micro_steps]
    if any(factor is None or not count for factor, count in zip(factors, counts, strict=True)):
        return True
    shares = [(factor or 0.0) / (count or 1) for factor, count in zip(factors, counts, strict=True)]
    return all(_close(share, shares[0]) for share in shares)


@check("G08", source="ranks")
def unequal_tokens(seen: Observation) -> Iterator[Finding]:
    """Means over different numbers of targets are averaged as if they were of the same number."""
    together: dict[int, list[tuple[int, MicroStep]]] = {}
    for rank in seen.ranks:
        for window in _stepped(rank):
            for one in window.micro_steps:
                together.setdefault(window.step.number if window.step else 0, []).append(
                    (rank.rank, one)
                )
    if len(seen.ranks) < seen.world or not watched(seen):
        return
    for number, ones in sorted(together.items()):
        if len(ones) < 2 or len({rank for rank, _ in ones}) < len(seen.ranks):
            continue
        counts = [_valid(one) for _, one in ones]
        if None in counts or not any(_padded(one) for _, one in ones):
            continue
        fewest, most = min(counts), max(counts)  # type: ignore[type-var]
        if not fewest or most < SPREAD * fewest:  # type: ignore[operator]
            continue
        if _weighted_by(Window([one for _, one in ones], []), counts):
            continue
        told = [
            f"rank {rank}: {[count for (r, _), count in zip(ones, counts, strict=True) if r == rank]}"
            for rank, _ in ones
        ]
        yield found(
            "G08",
            "warning",
            f"step {number} averages {len(ones)} mean losses over {fewest} to {most} counted targets (the rest is "
            "ignore_index) as if "
            f"they were of equal size: a token in the smallest counts {most / fewest:.0f} times as much as one in the largest",  # type: ignore[operator]
            "reduction='sum', divided by the all-reduced number of counted targets of the whole step, times the world size "
            "(DDP divides by it)",
            place_of(ones[0][1].backward),
            [f"counted targets at step {number}: " + "; ".join(dict.fromkeys(told))],
        )
        return


def _stepped(rank: RankSeen) -> list[Window]:
    from paralab.doctor.windows import windows

    return [window for window in windows(rank) if window.step and window.micro_steps]


def _valid(one: MicroStep) -> int | None:
    counted = [
        loss.valid
        for loss in one.losses
        if loss.grad and loss.reduction == "mean" and loss.valid is not None
    ]
    return (
        counted[0] if len(counted) == len([loss for loss in one.losses if loss.grad]) == 1 else None
    )


def _padded(one: MicroStep) -> bool:
    total = 1
    for size in one.losses[-1].target_shape:
        total *= size
    return (_valid(one) or total) < total


@check("G09", source="ranks")
def scheduled_too_often(seen: Observation) -> Iterator[Finding]:
    """The scheduler steps in every micro-batch, the optimizer at the end of a window."""
    for rank in seen.ranks:
        all_windows = list(accumulated(rank))
        often = [
            (window, events)
            for window in all_windows
            if len(events := [event for event in window.events if isinstance(event, Scheduled)]) > 1
            and len({event.site for event in events}) == 1
        ]
        if len(often) < 2 or 2 * len(often) < len(all_windows):
            continue
        window, events = often[-1]
        yield found(
            "G09",
            "warning",
            f"the scheduler is stepped {len(events)} times for one optimizer step ({len(window.micro_steps)} micro-batches): "
            "unless its "
            f"length was given in micro-batches, the learning rate moves {len(events)} times too fast",
            "scheduler.step() right after optimizer.step(), in the same block",
            place_of(events[-1]),
            [
                f"rank {rank.rank}: {len(rank.of(Scheduled))} scheduler steps, {len(rank.steps)} optimizer steps"
            ],
        )
        return
