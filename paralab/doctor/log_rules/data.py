"""What DataLoader and samplers say."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.said import claims, errors
from paralab.doctor.registry import check

BOTH = claims(r"sampler option is mutually exclusive with shuffle")
ITERABLE = claims(r"DataLoader with IterableDataset: expected unspecified (\w+) option")


@check("T03", source="log")
def shuffle_and_sampler(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, BOTH):
        yield said.finding(
            "T03",
            "error",
            f"The DataLoader{said.at} got shuffle=True and a sampler: the sampler decides the order, so the two contradict each "
            "other.",
            "DataLoader(data, sampler=sampler) and DistributedSampler(data, shuffle=True)",
        )


@check("T04", source="log")
def sampler_of_a_stream(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, ITERABLE):
        yield said.finding(
            "T04",
            "error",
            f"The DataLoader{said.at} got a {said.match[1]} for an IterableDataset, which cannot be indexed: it must leave out "
            "the other ranks' samples itself.",
            "in __iter__: itertools.islice(source, rank * workers + worker, None, ranks * workers); no sampler",
        )
