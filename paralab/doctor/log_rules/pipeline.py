"""What pipeline schedules say when batches and micro-batches do not fit."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.said import claims, errors
from paralab.doctor.registry import check

SIZE = claims(
    r"pipelining[/\\](?:schedules|stage)\.py.*The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"
)
FEWER = claims(
    r"Tensor size (\d+) is smaller than num_chunks|Expecting (\d+) arg_mbs but got (\d+)"
)
STAGES = claims(
    r"Number of microbatches \((\d+)\) must be greater than or equal to the number of stages \((\d+)\)"
)
BACKWARD = claims(
    r"Failed to run stage backward:.*?Stage output: \('?Tensor\(torch\.Size\(\[([\d, ]+)\]\).*?Output gradient: "
    r"\('?Tensor\(torch\.Size\(\[([\d, ]+)\]\)"
)
MULTIPLE = "drop_last=True, and a batch size that is a multiple of n_microbatches (the last batch of the loader too)"


@check("P01", source="log")
def unequal_chunks(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, SIZE):
        a, b = said.match.groups()
        yield said.finding(
            "P01",
            "error",
            f"{said.who} met micro-batches of {a} and of {b} rows in one step{said.at}: the batch cannot be divided evenly by "
            "the number of micro-batches, and the stages' receive buffers keep the shape of the first one.",
            MULTIPLE,
        )


@check("P02", source="log")
def fewer_rows_than_chunks(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, FEWER):
        rows = said.match[1] or said.match[3]
        yield said.finding(
            "P02",
            "error",
            f"A batch of {rows} rows came{said.at}, fewer than there are micro-batches"
            + (f" ({said.match[2]})." if said.match[2] else ".")
            + " It is the last one of the loader, as a rule.",
            MULTIPLE,
        )


@check("P03", source="log")
def fewer_chunks_than_stages(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, STAGES):
        chunks, stages = said.match.groups()
        yield said.finding(
            "P03",
            "error",
            f"{chunks} micro-batch for {stages} stages{said.at}: 1F1B keeps one micro-batch in every stage, so it needs at least "
            f"{stages}.",
            f"n_microbatches >= {stages}, better {4 * int(stages)}",
        )


@check("P04", source="log")
def broadcast_rows(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, BACKWARD):
        output, gradient = said.match.groups()
        yield said.finding(
            "P04",
            "error",
            f"{said.who} sent a micro-batch of shape ({output}) and got a gradient of shape ({gradient}) back{said.at}: the next "
            "stage received it into the buffer of a larger one, and the loss broadcast the difference away.",
            MULTIPLE,
        )
