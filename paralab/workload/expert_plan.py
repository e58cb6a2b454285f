"""The plain numbers of expert parallelism: the layers whose experts are divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLayer:
    """A submodule with the parameters of several experts. Dim 0 of each parameter is the expert.

    experts     the number of experts
    chosen      how many of them each token uses in the trial
    parameters  the number of parameters of all experts
    reason      why its experts are not divided; empty if they are
    """

    name: str
    experts: int
    chosen: int = 0
    parameters: int = 0
    reason: str = ""


@dataclass(frozen=True)
class ExpertPlan:
    """The expert layers of a model, divided among a number of shards. `problem` says why they
    cannot be used, or is None."""

    shards: int
    layers: tuple[ExpertLayer, ...]
    problem: str | None = None

    @property
    def kept(self) -> tuple[ExpertLayer, ...]:
        return tuple(layer for layer in self.layers if not layer.reason)
