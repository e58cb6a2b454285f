"""A workload in plain numbers: what a plan needs to know about a model without importing torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A part of the model that a stage may begin with.

    name      the sub-module whose call begins the part
    modules   the sub-modules (by name) whose parameters and buffers the part owns
    seconds   measured time of its forward and backward pass on one device, the shortest of several
    flops     of its forward and backward pass: matrix products, convolutions, attention; None: not counted
    activation_bytes_per_sample   what its forward pass keeps for the backward pass, in fp32; None: not counted
    """

    name: str
    modules: tuple[str, ...]
    seconds: float
    parameter_bytes: int
    activation_bytes_per_sample: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Unit:
    """A sub-module whose parameters can be sharded together: whole while it is called, in pieces
    otherwise."""

    name: str
    parameter_bytes: int


@dataclass(frozen=True)
class Summary:
    """`layers` is empty when no strategy needed them; `uncut_reason` says why there are no more
    places to cut."""

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
    flops_per_sample: float | None = (
        None  # forward and backward: matrix products, convolutions, attention; None: none found
    )
    unused: tuple[
        str, ...
    ] = ()  # trainable parameters that a trial step, or one of several samples, gave no gradient
    sparse: tuple[str, ...] = ()  # parameters whose gradient is a sparse tensor
    state: tuple[
        str, ...
    ] = ()  # buffers and attributes that every forward changes, BatchNorm's aside
    sometimes: tuple[str, ...] = ()  # sub-modules that only some calls of the forward use
    scalar_output: bool = False  # the output has a number in it that is not per sample
    layers: tuple[Layer, ...] = ()
    uncut_reason: str | None = None
    units: tuple[Unit, ...] = ()
    scalars: tuple[str, ...] = ()  # parameters without a dimension
    optimizer_bytes_per_byte: float | None = (
        None  # state that the optimizer keeps per byte of parameters; None: not known
    )
    whole_tensors: bool = False  # the optimizer's step on a part of a parameter is not a part of its step on the whole
    whole_model: bool = False  # the optimizer's step on a parameter depends on other parameters
    split_problem: str | None = (
        None  # why no way of splitting a batch can give the loss of the whole; None: it can, or nobody asked
    )

    @property
    def controls(self) -> tuple[str, ...]:
        return controls(self.batch_norms, self.random, self.state)


def controls(batch_norms: int, random: bool, state: tuple[str, ...]) -> tuple[str, ...]:
    """What a proof must hold still (`paralab.workload.proof_controls`)."""
    found = {"batch_norm": bool(batch_norms), "random": random, "state": bool(state)}
    return tuple(name for name, there in found.items() if there)
