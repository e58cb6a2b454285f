"""What DistributedDataParallel says: parameters, graphs, buffers, models that differ."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.layouts import in_same_order
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.said import blamed, claims, errors, lines, tells
from paralab.doctor.registry import check

UNFINISHED = claims(
    r"Expected to have finished reduction in the prior iteration before starting a new one"
)
CHANGED = re.compile(r"training graph has changed in this iteration")
INDICES = re.compile(r"Parameter indices which did not receive grad for rank (\d+): ([\d ]+)")
NAMES = re.compile(r"Parameters which did not receive grad for rank \d+: ([^\n]+)")
TWICE = claims(r"Expected to mark a variable ready only once")
NAMED = re.compile(r"Parameter at index (\d+)(?: with name (\S+))? has been marked as ready twice")
NEEDLESS = re.compile(
    r"find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters"
)
INPLACE = claims(
    r"one of the variables needed for gradient computation has been modified by an inplace operation: \[(?P<tensor>[^\]]+\])\]?,? "
    r".{0,80}?is at version (?P<now>\d+); expected version (?P<then>\d+)"
)
ONE_VALUE = claims(
    r"Expected more than 1 value per channel when training, got input size torch\.Size\(\[([\d, ]+)\]\)"
)
SYNC_ON_CPU = claims(
    r"SyncBatchNorm (?:layers only work with GPU modules|expected input tensor to be on)"
)
ATTACHED = re.compile(r"c10d::(\w+): an autograd kernel was not registered")
STRIDES = re.compile(r"Grad strides do not match bucket view strides")
GRADIENT = re.compile(r"\bgrad\.sizes\(\) = \[([\d, ]*)\], strides\(\) = \[([\d, ]*)\]")
BUCKET = re.compile(r"bucket_view\.sizes\(\) = \[([\d, ]*)\], strides\(\) = \[([\d, ]*)\]")
COUNTS = claims(
    r"DDP expects same model across all ranks, but Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params"
)
SHAPES = claims(
    r"\[(\d+)\]: params\[(\d+)\] in this process with sizes \[([\d, ]*)\] appears not to match"
)
ON_CPU = claims(
    r"device_ids and output_device arguments only work with .{0,80}but got device_ids "
    r"(\[[^\]]*\])(?:.*?module parameters (\{.*?\}))?"
)


@tells("S01", "S03", "H14")
def unused_parameters(logs: Logs) -> Iterator[Finding]:
    """Also S03 and H14: the same words of DDP with another reason."""
    said = errors(logs, UNFINISHED)
    if said is None:
        return
    text = said.match.string
    if CHANGED.search(text):
        yield said.finding(
            "S03",
            "error",
            f"{said.who} took another path through the model than in its first step{said.at}, and DDP was promised with "
            "static_graph=True that this does not happen.",
            "DDP(model) without static_graph=True, or the same parameters in every step",
        )
        return
    which = INDICES.search(text)
    named = NAMES.search(text)
    parameters = (
        named[1].strip() if named else f"number {', '.join(which[2].split())}" if which else "some"
    )
    fix = "remove or freeze (requires_grad_(False) before wrapping) what is not used, or DDP(model, find_unused_parameters=True)"
    noticed = [
        event.rank
        for event in blamed(logs).victims
        if event.rank is not None and event.rank not in said.ranks
    ]
    if said.rank is not None and noticed:
        yield said.finding(
            "H14",
            "error",
            f"Only {said.who} has parameters without a gradient ({parameters}); rank {noticed[0]} used them and waited for their "
            f"average: the ranks went different ways through the model in the step before{said.at}.",
            "let every rank use every parameter in every step (add 0 * output of the branch that is skipped), or "
            "find_unused_parameters=True",
        )
        return
    yield said.finding(
        "S01",
        "error",
        f"The parameters {parameters} got no gradient in the step before{said.at}, so DDP waits for them for ever; {said.who} "
        "noticed it at the next forward. "
        + (
            ""
            if named
            else "Numbers count model.parameters() from 0; TORCH_DISTRIBUTED_DEBUG=INFO prints the names."
        ),
        fix,
    )


@check("S02", source="log")
def ready_twice(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, TWICE):
        named = NAMED.search(said.match.string)
        which = f"parameter {named[2] or named[1]}" if named else "a parameter"
        yield said.finding(
            "S02",
            "error",
            f"In one backward of {said.who}{said.at} {which} was finished twice: a reentrant checkpoint runs its part of the "
            "graph on its own, or the parameter is used in two places that DDP sees as one.",
            "checkpoint(..., use_reentrant=False); without find_unused_parameters=True; or DDP(model, static_graph=True)",
        )


@check("S04", source="log")
def needless_search(logs: Logs) -> Iterator[Finding]:
    if said := lines(logs, NEEDLESS):
        yield said.finding(
            "S04",
            "warning",
            "DDP looks for unused parameters in every step (find_unused_parameters=True) and found none: the search walks the "
            "whole graph each time, and buckets are not rebuilt in the order of arrival.",
            "drop find_unused_parameters=True, unless other steps do leave parameters out",
        )


@check("S05", source="log")
def buffers_overwritten(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, INPLACE):
        yield said.finding(
            "S05",
            "suspect",
            f"Backward of {said.who}{said.at} needs a tensor [{said.match['tensor']} as it was (version {said.match['then']}), "
            f"and it was written to since (version {said.match['now']}). With DDP and two forwards before one backward, the "
            "second one's broadcast of the buffers does that. Certain if the model is wrapped in DDP, has BatchNorm, and is "
            "called twice before backward().",
            "DDP(model, broadcast_buffers=False) (forward_sync_buffers=False from 2.13), SyncBatchNorm, or one forward of both "
            "batches",
        )


@check("S09", source="log")
def batch_norm_of_one(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, ONE_VALUE):
        yield said.finding(
            "S09",
            "error",
            f"{said.who} got a batch of shape ({said.match[1]}){said.at}: one row has no variance, so BatchNorm cannot normalize "
            "it. It is the rest of the data set that is left over for this rank.",
            "drop_last=True in the DataLoader (and in the DistributedSampler), or larger batches per rank",
        )
    elif said := errors(logs, SYNC_ON_CPU):
        yield said.finding(
            "S09",
            "error",
            f"SyncBatchNorm of {said.who}{said.at} works on GPUs only, and the model is on the CPU.",
            "convert_sync_batchnorm only if the model is on a GPU; on CPU ranks use larger batches per rank",
        )


@check("S13", source="log")
def reduced_loss_in_the_graph(logs: Logs) -> Iterator[Finding]:
    if said := lines(logs, ATTACHED):
        call = said.match[1].rstrip("_")
        yield said.finding(
            "S13",
            "error",
            f"backward() goes through a collective ({call}): the tensor that was reduced still belongs to the graph. What it "
            "passes back is not the derivative of the reduction.",
            "reduce a copy for the log: value = loss.detach().clone(); dist.all_reduce(value); and call backward() on the local "
            "loss",
        )


@check("S17", source="log")
def gradient_layout(logs: Logs) -> Iterator[Finding]:
    if said := lines(logs, STRIDES):
        gradient, bucket = _layout(logs, GRADIENT), _layout(logs, BUCKET)
        which = f"A gradient of shape {gradient[0]}" if gradient else "A gradient"
        fix = (
            "model.to(memory_format=torch.channels_last) before DistributedDataParallel(…), and .contiguous() after transpose or "
            "permute; the parameters of this shape are those to look at"
        )
        if gradient and bucket and in_same_order(*gradient, bucket[1]):
            why = (
                f"{which} differs from DDP's bucket in the strides of dimensions of size 1 only ({gradient[1]} against "
                f"{bucket[1]}), as 1x1 convolutions of channels_last or permuted data do: the values lie in the same order, and "
                "for this one it costs nothing. DDP warns of the first one only: certain with `paralab doctor -- COMMAND`, which "
                "sees them all and names them."
            )
            yield said.finding("S17", "suspect", why, fix)
            return
        why = f"{which} lies in memory in another order than DDP's bucket, so it is rearranged in every step; the result is right."
        yield said.finding("S17", "warning", why, fix)


def _layout(logs: Logs, pattern: re.Pattern[str]) -> tuple[list[int], list[int]] | None:
    """Shape and strides, as DDP prints them for the gradient and for its view of the bucket."""
    found = next((match for line in logs.lines if (match := pattern.search(line.text))), None)
    if found is None:
        return None
    shape, strides = (
        [int(number) for number in group.split(",") if number.strip()] for group in found.groups()
    )
    return (shape, strides) if len(shape) == len(strides) else None


@check("L07", source="log")
def different_models(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, COUNTS):
        rank, own, other, others = said.match.groups()
        yield said.of_all().finding(
            "L07",
            "error",
            f"Rank {rank} wraps a model with {own} parameters, rank {other} one with {others}{said.at}: DDP pairs parameters by "
            "their order.",
            "build the model from the same configuration on all ranks (broadcast it from rank 0 if it is found at run time)",
        )
    elif said := errors(logs, SHAPES):
        rank, index, sizes = said.match.groups()
        yield said.finding(
            "L07",
            "error",
            f"Parameter number {index} has shape ({sizes}) on rank {rank} and another one on rank 0{said.at}: the model depends "
            "on the rank.",
            "build the model from the same configuration on all ranks: vocabulary, number of classes, random architecture",
            rank=int(rank),
        )


@check("L08", source="log")
def device_ids_of_a_cpu_module(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, ON_CPU):
        where = f" ({said.match[2]})" if said.match[2] else ""
        yield said.finding(
            "L08",
            "error",
            f"DDP got device_ids={said.match[1]}{said.at}, but the model's parameters are not on one GPU{where}.",
            "model.to(device) before DDP; on CPU ranks DDP(model) without device_ids",
        )
