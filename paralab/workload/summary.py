"""A workload in plain numbers: what a plan needs to know about a model without importing torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A part of the model that a stage may begin with.

    name      the sub-module whose call begins the part
    modules   the sub-modules (by name) whose parameters and buffers the part owns
    seconds   measured time of its forward and backward pass on one device
    activation_bytes_per_sample   what its forward pass keeps for the backward pass, in fp32; None: not counted
    """

    name: str
    modules: tuple[str, ...]
    seconds: float
    parameter_bytes: int
    activation_bytes_per_sample: float | None = None


@dataclass(frozen=True)
class Unit:
    """A sub-module whose parameters can be sharded together: whole while it is called, in pieces otherwise."""

    name: str
    parameter_bytes: int


@dataclass(frozen=True)
class Summary:
    """`layers` is empty when no strategy needed them; `uncut_reason` says why there are no more places to cut."""

    name: str
    parameters: int
    parameter_bytes: int
    samples: int | None
    batch_size: int
    data_path: str
    weighted: bool
    optimizer: str
    batch_norms: int
    dropout: bool  # the forward draws random numbers, but not when dropout is switched off
    random: bool  # it draws them even then
    flops_per_sample: float | None = None  # forward and backward: matrix products, convolutions, attention; None: none found
    unused: tuple[str, ...] = ()  # trainable parameters that a trial step gave no gradient
    layers: tuple[Layer, ...] = ()
    uncut_reason: str | None = None
    units: tuple[Unit, ...] = ()
    scalars: tuple[str, ...] = ()  # parameters without a dimension
    optimizer_bytes_per_byte: float | None = None  # state that the optimiser keeps per byte of parameters; None: not known
