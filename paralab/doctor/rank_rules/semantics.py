"""What DDP does and does not do: parameters without gradients, options that cost or break,
statistics, random streams, reductions. Replicas that come apart are in `drift`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from paralab.doctor.agreement import found, is_data_parallel, listed, place_of, watched, wraps
from paralab.doctor.events import (
    Backward,
    Batch,
    Collective,
    Forward,
    Loader,
    Loss,
    Seed,
    Trainable,
    Wrap,
)
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.place import Place
from paralab.doctor.registry import check
from paralab.doctor.windows import windows

UNFINISHED = "Expected to have finished reduction in the prior iteration"
WITHOUT = re.compile(r"did not receive grad for rank \d+: ([\d ]*\d)")
CHANGED = "training graph has changed in this iteration"
TWICE = "mark a variable ready only once"
ONE_VALUE = "Expected more than 1 value per channel when training"
FEW_SAMPLES = 16  # per rank, below which the statistics of a BatchNorm are noise
LOOKED_AT = 3  # passes, before anything is said about all of them


# --- parameters without gradients
# ----------------------------------------------------------------------------------------------


@check("S01", source="ranks")
def unused_parameters(seen: Observation) -> Iterator[Finding]:
    finding = unused(seen)
    if finding is not None and finding.id == "S01":
        yield finding


@check("S07", source="ranks")
def frozen_too_late(seen: Observation) -> Iterator[Finding]:
    finding = unused(seen)
    if finding is not None and finding.id == "S07":
        yield finding


@lru_cache(maxsize=1)
def unused(seen: Observation) -> Finding | None:
    """On all ranks the same parameters get no gradient, and DDP waits for them."""
    if not is_data_parallel(seen):
        return None
    for wrap in wraps(seen.ranks[0]):
        if wrap.options.get("find_unused_parameters") or wrap.options.get("static_graph"):
            continue
        lacking = [_lacking(rank, wrap) for rank in seen.ranks]
        names = [name for name in lacking[0] if all(name in other for other in lacking)]
        if not names:
            continue
        complaint = next(
            (
                rank.raised
                for rank in seen.ranks
                if rank.raised and UNFINISHED in rank.raised.message
            ),
            None,
        )
        said = [complaint.message.splitlines()[0][:160]] if complaint else []
        frozen = [
            event
            for event in seen.ranks[0].of(Trainable)
            if event.name in names and not event.trainable
        ]
        if frozen and complaint:
            return found(
                "S07",
                "error",
                f"{listed(names)} were trainable when DDP was made and are frozen here: DDP still waits for their gradients, and "
                "fails in the forward after the next",
                "freeze before DistributedDataParallel(…), or wrap the module again after freezing (and make a new optimizer)",
                place_of(frozen[0]),
                [f"without gradient after backward: {listed(names, 8)}", *said],
            )
        unsure = "" if complaint else ". Certain when the next forward comes: DDP raises there"
        return found(
            "S01",
            "error" if complaint else "suspect",
            f"{listed(names)} of {wrap.model_class} get no gradient from the loss, on any rank: DDP waits for all "
            f"{sum(wrap.trainable)} "
            f"trainable parameters before it calls the averaging done, and fails in the next forward{unsure}",
            f"use {names[0].rpartition('.')[0] or names[0]} in the loss, or remove it, or freeze it before wrapping, or "
            "DistributedDataParallel(…, find_unused_parameters=True)",
            place_of(wrap),
            [f"without gradient after backward: {listed(names, 8)}", *said],
        )
    return None


def _lacking(rank: RankSeen, wrap: Wrap) -> list[str]:
    """Without a gradient after a pass that went through the wrapper, and in which DDP was to
    average: as DDP says, or as was seen. A model of which no parameter has one takes part in
    another loss, later (a GAN's generator, while the other one learns)."""
    told = (
        WITHOUT.search(rank.raised.message)
        if rank.raised and UNFINISHED in rank.raised.message
        else None
    )
    if told:
        trained = [name for name, is_on in zip(wrap.names, wrap.trainable, strict=True) if is_on]
        places = [int(place) for place in told[1].split()]
        return (
            [trained[place] for place in places]
            if len(wraps(rank)) == 1 and max(places) < len(trained)
            else []
        )
    for window in windows(rank):
        forwards = [forward for one in window.micro_steps for forward in one.forwards]
        if any(
            f.model == wrap.model and f.grad and f.sync and f.through == "wrapper" for f in forwards
        ):
            lacking = (window.micro_steps[-1].backward.lacking or {}).get(str(wrap.model))
            if lacking and len(lacking) < sum(wrap.trainable):
                return lacking
    return []


@check("S02", source="ranks")
def ready_twice(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        if rank.raised and TWICE in rank.raised.message:
            name = rank.raised.message.partition("with name ")[2].split(" ")[0]
            wrap = rank.last(Wrap)
            yield found(
                "S02",
                "error",
                f"in this backward pass {name or 'a parameter'} was ready for averaging twice: a part of the model is computed "
                "again "
                "(reentrant checkpointing), or used twice, under "
                f"{'find_unused_parameters=True' if wrap and wrap.options.get('find_unused_parameters') else 'DDP'}",
                "checkpoint(…, use_reentrant=False), without find_unused_parameters; or static_graph=True",
                rank.raised.place,
                [f"rank {rank.rank}: {rank.raised.message.splitlines()[0][:160]}"],
            )
            return


@check("S03", source="ranks")
def changing_graph(seen: Observation) -> Iterator[Finding]:
    finding = changed_graph(seen)
    if finding is not None:
        yield finding


@lru_cache(maxsize=1)
def changed_graph(seen: Observation) -> Finding | None:
    for rank in seen.ranks:
        wrap = next((wrap for wrap in wraps(rank) if wrap.options.get("static_graph")), None)
        raised = rank.raised
        if (
            wrap is None
            or raised is None
            or (CHANGED not in raised.message and UNFINISHED not in raised.message)
        ):
            continue
        first = (
            next((event.lacking for event in rank.of(Backward) if event.lacking is not None), {})
            or {}
        )
        names = first.get(str(wrap.model), [])
        told = f" ({listed(names)} had no gradient in the first pass)" if names else ""
        return found(
            "S03",
            "error",
            f"static_graph=True promises that every pass uses the same parameters, but pass {len(rank.of(Backward))} used "
            "others than the "
            f"first{told}",
            "leave static_graph out here; find_unused_parameters=True if some parameters are unused in some passes",
            place_of(wrap),
            [f"rank {rank.rank}, {raised.place}: {raised.message.splitlines()[0][:160]}"],
        )
    return None


@check("S04", source="ranks")
def needless_search(seen: Observation) -> Iterator[Finding]:
    if not is_data_parallel(seen):
        return
    for wrap in wraps(seen.ranks[0]):
        if not wrap.options.get("find_unused_parameters") or wrap.options.get("static_graph"):
            continue
        key = str(wrap.model)
        looked = [
            [b for b in rank.of(Backward) if b.unused_bytes is not None and key in b.unused_bytes]
            for rank in seen.ranks
        ]
        if any(
            len(events) <= LOOKED_AT for events in looked
        ):  # what DDP found in the last of them is not known yet
            continue
        if any(
            (e.unused_bytes or {}).get(key) or (e.lacking or {}).get(key)
            for events in looked
            for e in events
        ):
            continue
        yield found(
            "S04",
            "warning",
            f"find_unused_parameters=True makes DDP walk through the whole graph of {wrap.model_class} after every forward, "
            "and in the "
            f"{len(looked[0])} passes that were looked at all {sum(wrap.trainable)} trainable parameters were used, on all ranks",
            "leave find_unused_parameters out, if no branch of the model is ever left out",
            place_of(wrap),
            [
                f"rank {rank.rank}: 0 bytes unused in {len(events)} passes"
                for rank, events in zip(seen.ranks, looked, strict=True)
            ],
        )


# --- statistics and random streams
# ---------------------------------------------------------------------------------------------


@check("S09", source="ranks")
def tiny_batches(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        if rank.raised and ONE_VALUE in rank.raised.message:
            yield found(
                "S09",
                "error",
                f"a BatchNorm got a batch of one sample on rank {rank.rank}, of which it can make no statistics: the last "
                "batch of its "
                "part of the data",
                "drop_last=True in the DataLoader",
                rank.raised.place,
                [rank.raised.message.splitlines()[0][:160]],
                rank.rank,
            )
            return
    for wrap in wraps(seen.ranks[0]) if is_data_parallel(seen) else []:
        trained = [
            f
            for f in seen.ranks[0].of(Forward)
            if f.model == wrap.model and f.training and f.grad and f.size is not None
        ]
        sizes = [forward.size for forward in trained if forward.size is not None]
        usual = max(set(sizes), key=sizes.count) if sizes else FEW_SAMPLES
        if wrap.batch_norms and not wrap.sync_batch_norms and usual < FEW_SAMPLES:
            yield found(
                "S09",
                "warning",
                f"{wrap.batch_norms} BatchNorm layer{'s' if wrap.batch_norms > 1 else ''} of {wrap.model_class} "
                f"normalize{'' if wrap.batch_norms > 1 else 's'} over the {usual} samples of one rank, not over the "
                f"{usual * seen.world} of all {seen.world}; only rank 0's running statistics are kept",
                "SyncBatchNorm.convert_sync_batchnorm(model) before DDP (on GPUs), a larger batch per rank, or GroupNorm",
                place_of(wrap),
                [f"samples in a forward of rank 0: {usual}, {len(sizes)} passes"],
            )


@check("S10", source="ranks")
def same_random_numbers(seen: Observation) -> Iterator[Finding]:
    """The random streams of all ranks are in the same state, and are drawn from."""
    if not is_data_parallel(seen) or not watched(seen):
        return
    drawn = [_streams(rank) for rank in seen.ranks]
    common = set.intersection(*(set(streams) for streams in drawn))
    equal = [
        number for number in sorted(common) if len({streams[number] for streams in drawn}) == 1
    ]
    if len(equal) < 2 or len(equal) < len(common):
        return
    rank = seen.ranks[0]
    dropouts = max((wrap.dropouts for wrap in wraps(rank)), default=0)
    between = [
        number
        for number in equal
        if number - 1 in equal and drawn[0][number] != drawn[0][number - 1]
    ]
    if not dropouts and not any(_inside_a_pass(rank, number) for number in between):
        return  # nobody draws from it while training
    seeds = [event for event in rank.of(Seed) if event.t < rank.of(Forward)[equal[0]].t]
    seed = seeds[-1] if seeds else None
    what = (
        f"{dropouts} dropout layer{'s' if dropouts > 1 else ''}"
        if dropouts
        else "random numbers drawn between forward passes"
    )
    unsure = "" if dropouts else ". Certain if they are not meant to be equal"
    seeded = (
        f"torch.manual_seed({seed.seed}) on every rank" if seed else "the same seed on every rank"
    )
    yield found(
        "S10",
        "warning" if dropouts else "suspect",
        f"{seeded}: all {len(seen.ranks)} ranks are in the same place of the same random stream in every pass, so {what} "
        f"{'make' if dropouts > 1 or not dropouts else 'makes'} the same choices on all of them, which is less noise than "
        f"meant{unsure}",
        "torch.manual_seed(seed + rank), after the model is built",
        place_of(seed or rank.of(Forward)[equal[0]]),
        [
            f"state of the stream at forward pass {number + 1}: {drawn[0][number]:#x} on all ranks"
            for number in equal[:3]
        ],
    )


def _streams(rank: RankSeen) -> dict[int, int]:
    """Number of a training forward -> state of the random stream."""
    return {
        i: f.random
        for i, f in enumerate(rank.of(Forward))
        if f.random is not None and f.training and f.grad
    }


def _inside_a_pass(rank: RankSeen, number: int) -> bool:
    """Between forward `number` and the one before it no pass over a loader began: that draws a
    number of its own."""
    before, after = rank.of(Forward)[number - 1 : number + 1]
    return not any(before.t < event.t < after.t for event in rank.of(Loader))


# --- reductions
# ----------------------------------------------------------------------------------------------------------------


@check("S13", source="ranks")
def reduced_in_the_graph(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        for backward in rank.of(Backward):
            if not backward.reduced:
                continue
            call = next(
                (e for e in reversed(rank.of(Collective)) if e.in_graph and e.t < backward.t), None
            )
            if call is None:
                continue
            yield found(
                "S13",
                "error",
                f"this {call.op} overwrites a tensor that the backward at {backward.site} then goes back through: autograd "
                "knows nothing of "
                "the other ranks' part, so the value is that of all ranks and the gradient that of this one",
                f"reduce a copy: shown = loss.detach().clone(); dist.{call.op}(shown)",
                place_of(call),
                [f"rank {rank.rank}: gave {call.value}, backward started from {backward.loss}"],
            )
            return


@check("S14", source="ranks")
def sum_shown_as_mean(seen: Observation) -> Iterator[Finding]:
    """The losses of all ranks are added up, and in the function that does so nothing is divided. A
    loss that is a sum, or that may have been divided by what all ranks have counted together
    before, may be added up."""
    rank = seen.ranks[0] if seen.ranks else None
    if (
        rank is None
        or len(seen.ranks) < 2
        or any(loss.grad and loss.reduction != "mean" for loss in rank.of(Loss))
    ):
        return
    sums: dict[Place, list[tuple[Collective, float]]] = {}
    loss: float | None = None
    counted = False  # something else was added up, for the step that comes
    for event in rank.events:
        if isinstance(event, Batch):
            counted = False
        elif isinstance(event, Backward):
            loss = event.loss if isinstance(event.loss, float) and not counted else None
            counted = False
        elif (
            isinstance(event, Collective)
            and event.op in ("all_reduce", "reduce")
            and event.reduction == "SUM"
        ):
            place = place_of(event)
            if (
                place
                and loss
                and event.value is not None
                and not event.in_graph
                and abs(event.value - loss) <= 1e-5 * abs(loss)
            ):
                sums.setdefault(place, []).append((event, loss))
            else:
                counted = True
    for place, calls in sums.items():
        event, value = calls[-1]
        if len(calls) < 2 or any(map(_divides_after, event.site.stack[:2] if event.site else [])):
            continue
        yield found(
            "S14",
            "warning",
            f"the loss of this rank ({value:.4g}) is added up over {seen.world} ranks, and nothing divides the sum by {seen.world} "
            f"afterwards: what is shown is {seen.world} times the mean loss, and grows with the number of ranks",
            "divide by dist.get_world_size() after the all_reduce, or op=dist.ReduceOp.AVG (NCCL)",
            place,
            [
                f"{len(calls)} calls of {event.op} with SUM, each of the value that had gone into backward"
            ],
        )


def _divides_after(place: Place) -> bool:
    """The function divides something from this line on, or hands the result on; True where it
    cannot be read. What is reduced in place may also be divided by who called."""
    try:
        tree = ast.parse(Path(place.file).read_text())
    except (OSError, ValueError, SyntaxError):
        return True
    functions = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    around = [
        node for node in functions if node.lineno <= place.line <= (node.end_lineno or node.lineno)
    ]
    owner: ast.AST = max(around, key=lambda node: node.lineno) if around else tree
    later = [node for node in ast.walk(owner) if getattr(node, "lineno", 0) >= place.line]
    divides = (ast.Div, ast.FloorDiv)
    return any(
        (isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, divides))
        or (
            isinstance(node, ast.Attribute)
            and node.attr in ("div", "div_", "mean", "true_divide", "divide")
        )
        or (isinstance(node, ast.Return) and node.value is not None)
        or isinstance(node, (ast.Yield, ast.YieldFrom))
        for node in later
    )
