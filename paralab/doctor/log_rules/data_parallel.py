"""What nn.DataParallel says."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.said import claims, errors, lines
from paralab.doctor.registry import check

SCALARS = re.compile(r"Was asked to gather along dimension 0, but all input tensors were scalars")
NOT_SCALAR = claims(
    r"grad can be implicitly created only for scalar outputs",
    only=lambda logs: lines(logs, SCALARS) is not None,
)
REPLICA = claims(
    r"Caught TypeError in replica (\d+) on device (\d+).*missing \d+ required positional argument"
)
WRAPPER = claims(r"'(DataParallel|DistributedDataParallel)' object has no attribute '(\w+)'")
UNEQUAL = re.compile(r"imbalance between your GPUs\. You may want to exclude GPU (\d+) which")


@check("D01", source="log")
def scalar_losses(logs: Logs) -> Iterator[Finding]:
    if said := lines(logs, SCALARS):
        failed = errors(logs, NOT_SCALAR)
        said_at = failed or said
        yield said_at.finding(
            "D01",
            "error" if failed else "warning",
            "The loss is computed inside the DataParallel model: every GPU returns one number and they come back as a vector"
            + (
                f", of which backward(){said_at.at} cannot be taken."
                if failed
                else "; without .mean() the gradient is a sum over GPUs."
            ),
            "loss = model(...).mean() before backward()",
        )


@check("D03", source="log")
def too_few_rows(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, REPLICA):
        replica = int(said.match[1])
        yield said.finding(
            "D03",
            "error",
            f"Replica {replica} on device {said.match[2]} was called without arguments: the batch was cut into equal chunks and "
            f"there were at most {replica} for {replica + 1} or more GPUs (9 rows over 4 GPUs are chunks of 3, 3, 3 and nothing).",
            "drop_last=True, and a batch size that is a multiple of the number of GPUs",
        )


@check("D05", source="log")
def attribute_of_the_wrapper(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, WRAPPER):
        wrapper, name = said.match.groups()
        yield said.finding(
            "D05",
            "error",
            f"`{name}`{said.at} is asked of the {wrapper} wrapper, and belongs to the model inside it.",
            f"model.module.{name}",
        )


@check("D07", source="log")
def unequal_gpus(logs: Logs) -> Iterator[Finding]:
    if said := lines(logs, UNEQUAL):
        small = said.match[1]
        yield said.finding(
            "D07",
            "warning",
            f"GPU {small} has less than 75 % of the memory or cores of the largest one, and DataParallel gives all of them the "
            f"same share: every step waits for GPU {small}.",
            f"leave GPU {small} out of device_ids",
        )
