"""Describe a workload in plain numbers, so planning does not need to import torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from paralab.workload.expert_plan import ExpertPlan
from paralab.workload.sequence_plan import SequencePlan
from paralab.workload.tensor_group import TensorPlan


@dataclass(frozen=True)
class Inspection:
    """What to find out about a workload. `layers`, `units`, `blocks`, and `verify` are slow, so
    request only what you need.

    samples   the number of samples for the trial step; default: the workload's batch size
    threads   the number of threads per device; default: all
    layers    find where the model can be cut into stages
    units     find submodules that can be sharded separately
    blocks    find repeated blocks, and try which of them can be recomputed
    verify    check whether a batch can be split at all
    large     if the model is too large for this machine, inspect it without data
    """

    workload: str
    device: str = "auto"
    samples: int | None = None
    threads: int | None = None
    layers: bool = False
    units: bool = False
    blocks: bool = False
    verify: bool = False
    large: bool = False


@dataclass(frozen=True)
class Layer:
    """A part of the model at which a stage may begin.

    name      the submodule whose call begins the part
    modules   the names of the submodules whose parameters and buffers belong to the part
    seconds   measured forward and backward time on one device, the shortest of several runs
    flops     forward and backward FLOPs (only matrix products, convolutions, and attention); None
              if not counted
    activation_bytes_per_sample   bytes saved for backward, in fp32; None if not counted
    """

    name: str
    modules: tuple[str, ...]
    seconds: float
    parameter_bytes: int
    activation_bytes_per_sample: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Unit:
    """A submodule whose parameters are gathered only while the submodule is called."""

    name: str
    parameter_bytes: int


@dataclass(frozen=True)
class Block:
    """A submodule that looks like its siblings, such as a transformer layer.

    recomputes     how it can be recomputed in the backward pass: "full", "selective"
    python_random  whether it draws from Python's or numpy's generator, which threads share
    """

    name: str
    recomputes: tuple[str, ...]
    python_random: bool = False


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The fields of `Summary` that a trial step determines."""

    batch_norms: int
    dropout: bool
    random: bool
    flops_per_sample: float | None = None
    unused: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()
    unbatched: bool = False
    casts: bool = False
    hooked: tuple[str, ...] = ()
    read_by_loss: tuple[str, ...] = ()
    inner_backward: bool = False

    @property
    def controls(self) -> tuple[str, ...]:
        """What verification must control (`paralab.workload.verify_controls`)."""
        needed = {"batch_norm": self.batch_norms, "random": self.random, "state": self.state}
        needed["casts"] = self.casts
        return tuple(name for name, value in needed.items() if value)


@dataclass(frozen=True, kw_only=True)
class Summary(Trial):
    """A workload in plain numbers.

    dropout        whether the model draws random numbers, but only for dropout
    random         whether the model draws random numbers even when dropout is off
    unused         trainable parameters that get no gradient from the trial step or some sample
    sparse         parameters whose gradient is a sparse tensor
    state          buffers and attributes that each forward pass changes, except BatchNorm's
    sometimes      submodules that only some forward passes call
    unbatched      whether the output contains a tensor without a sample dim
    casts          whether the model casts to fp32, even in fp64; only checked for verification
    hooked         trainable parameters with a gradient hook
    read_by_loss   parameters that the loss function uses itself, not through the model's output
    inner_backward whether the forward or the loss runs a backward pass (`torch.autograd.grad`)
    layers         empty if not inspected; `uncut_reason` says why there are no more layers
    scalars        parameters without a dim
    imaginary      complex parameters
    dtypes         the dtypes of the optimizer's parameters
    whole_tensors  whether the optimizer treats part of a parameter differently from the whole
    whole_model    whether an optimizer step on a parameter depends on other parameters
    by_position    whether the optimizer's settings for a parameter depend on its position
    split_problem  why split batches do not add up to the full loss; None if they do, or if
                   this was not checked
    too_large      whether the model is too large for this machine, so nothing was measured
    tensor_plan    the layers that tp may split; None if not inspected
    sequence_plan  the blocks in which cp may split the sequence; None if not inspected
    expert_plan    the layers whose experts ep may divide; None if not inspected
    experts        modules that may be expert layers, with the number of experts
    flops_per_sample           FLOPs of forward and backward; None if not counted
    optimizer_bytes_per_byte   optimizer state in bytes per parameter byte; None if unknown
    """

    name: str
    parameters: int
    parameter_bytes: int
    samples: int | None
    batch_size: int
    data_path: str
    weighted: bool
    optimizer: str
    layers: tuple[Layer, ...] = ()
    uncut_reason: str | None = None
    units: tuple[Unit, ...] = ()
    blocks: tuple[Block, ...] = ()
    scalars: tuple[str, ...] = ()
    imaginary: tuple[str, ...] = ()
    optimizer_bytes_per_byte: float | None = None
    dtypes: tuple[str, ...] = ()
    whole_tensors: bool = False
    whole_model: bool = False
    by_position: bool = False
    split_problem: str | None = None
    too_large: bool = False
    tensor_plan: TensorPlan | None = None
    sequence_plan: SequencePlan | None = None
    expert_plan: ExpertPlan | None = None
    experts: dict[str, int] = field(default_factory=dict)
