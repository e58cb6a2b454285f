"""Describe one rank's side of a collective, and check that all ranks make the same call.

Every collective begins with an exchange of `Call`s. If they differ, every rank raises an error that
shows both sides; gloo and NCCL would hang or mix up the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Call:
    """One rank's side of a collective.

    `number` counts the collectives in the group. `elements` must match on all ranks. It is None if
    ranks may pass different amounts; in that case, `sends` has the bytes for each destination.
    `rounds` is the number of times that this rank must fill its staging slot.
    """

    number: int
    name: str
    dtype: str = ""
    elements: int | None = None
    shape: tuple[int, ...] = ()
    operator: str = ""
    root: int | None = None
    sends: tuple[int, ...] = ()
    rounds: int = 1
    device: str = "cpu"

    def encode(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Call:
        fields: dict[str, Any] = json.loads(data)
        lists = {"shape": tuple(fields["shape"]), "sends": tuple(fields["sends"])}
        return cls(**{**fields, **lists})

    def same_work(self, other: Call) -> bool:
        mine, theirs = (
            (*each.kind, each.number, each.elements, each.root) for each in (self, other)
        )
        return mine == theirs

    @property
    def kind(self) -> tuple[str, str, str, str]:
        return self.name, self.dtype, self.operator, self.device

    def __str__(self) -> str:
        words = [f"{self.name}({self.operator})" if self.operator else self.name]
        if self.root is not None:
            words.append(f"with root {self.root}")
        if self.dtype:
            words.append(f"of {self.dtype} {list(self.shape)}")
        if self.device != "cpu":
            words.append(f"on {self.device}")
        return " ".join(words)


def check_calls(
    rank: int,
    mine: Call,
    others: Mapping[int, Call],
    expects: tuple[int, ...],
    names: Sequence[int],
) -> None:
    """Raise unless every other rank makes the same call and sends as much as this rank expects."""
    for other, theirs in others.items():
        if not mine.same_work(theirs):
            numbers = "" if mine.number == theirs.number else f" as call {theirs.number}"
            raise dist.DistBackendError(
                f"Ranks make different calls: call {mine.number} of rank {names[rank]} is {mine}, but "
                f"rank {names[other]} calls {theirs}{numbers}."
            )
        if theirs.sends and expects and theirs.sends[rank] != expects[other]:
            raise dist.DistBackendError(
                f"Sizes differ in {mine.name} (call {mine.number}): rank {names[other]} sends "
                f"{theirs.sends[rank]:,} bytes to rank {names[rank]}, which expects "
                f"{expects[other]:,}."
            )
