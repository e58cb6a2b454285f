"""The results of a memory trial, and the estimate based on them, in plain numbers.

A trial runs training steps of the whole model on one device with fake tensors, which have shapes
but no data (`paralab.worker.inspection.memory_trial`). `paralab.plan.estimate` divides its numbers among the
devices.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paralab.plan.plan import Plan


@dataclass(frozen=True)
class Weight:
    """A parameter of the model.

    rows                the length of dim 0, which fsdp shards
    gradient_bytes      0 if it is frozen or unused
    state_bytes         optimizer state with the parameter's shape
    other_state_bytes   other optimizer state, such as a step counter
    group               the number of its parameter group in the optimizer; None without a group
    whole               the elements of all shards

    With tp, all other numbers are for one shard.
    """

    name: str
    rows: int
    elements: int
    bytes: int
    trained: bool
    gradient_bytes: int
    state_bytes: int
    other_state_bytes: int
    group: int | None = 0
    whole: int = 0


@dataclass(frozen=True)
class Pass:
    """The bytes that the forward and backward passes of one micro-batch need.

    saved        bytes that autograd saves for backward in each part of the model
    loss         bytes that autograd saves in the loss function, in addition to the last part
    loss_alone   the same if the loss gets a copy of the output
    first        peak of a step's first backward pass, which creates the gradients, in addition to
                 parameters, buffers, and optimizer state
    again        peak of a later backward pass, in addition to all of these and the gradients
    recomputed   peak in each part while it recomputes a block: the tensors that the backward pass
                 has not freed yet, plus those that this block saves; 0 without recomputation
    """

    samples: int
    batch_bytes: int
    saved: tuple[int, ...]
    loss: int
    loss_alone: int
    first: int
    again: int
    recomputed: tuple[int, ...] = ()

    def saved_in(self, part: int) -> int:
        """Return the bytes that autograd saves in one part. The last part includes the loss."""
        return self.saved[part] + (self.loss if part == len(self.saved) - 1 else 0)

    def recomputed_in(self, part: int) -> int:
        return self.recomputed[part] if self.recomputed else 0

    def added_in(self, part: int) -> int:
        """Return the bytes that recomputing blocks adds to this part's saved bytes."""
        return max(0, self.recomputed_in(part) - self.saved_in(part))


@dataclass(frozen=True)
class MemoryTrial:
    """The results of a trial of the whole model.

    buffers          bytes of each buffer, by name
    norms            names of BatchNorm modules, which fsdp keeps in fp32
    step_bytes       bytes of temporary tensors in the optimizer step
    workspace_bytes  bytes that CUDA libraries keep, measured on the GPU
    built            why the model was built with real tensors; None if it was built with fake ones
    """

    weights: tuple[Weight, ...]
    buffers: dict[str, int]
    norms: tuple[str, ...]
    passes: tuple[Pass, ...]
    step_bytes: int
    workspace_bytes: int = 0
    built: str | None = None

    def at(self, samples: int, number: Callable[[Pass], int]) -> int:
        """Return one of the numbers for a pass with this many samples. If no such pass ran,
        interpolate or extrapolate linearly from the two nearest passes, because activations grow
        with the number of samples.
        """
        known = {each.samples: number(each) for each in self.passes}
        if samples in known or len(known) == 1:
            return known.get(samples, next(iter(known.values())))
        sizes = sorted(known)
        after = min(max(1, bisect(sizes, samples)), len(sizes) - 1)
        x0, x1 = sizes[after - 1 : after + 1]
        return round(known[x0] + (samples - x0) * (known[x1] - known[x0]) / (x1 - x0))


Kind = tuple[Hashable, ...]


def kind_of(plan: Plan) -> Kind:
    """Return what the model's run depends on. It is equal for plans that differ only in devices,
    sizes, and cuts between stages."""
    blocks = plan.recompute, plan.recomputed, plan.micro_batches == 1  # affects autocast's cache
    split = plan.tensor_plan, plan.sequence_plan
    return plan.workload, plan.precision, plan.shards_parameters, split, blocks


@dataclass(frozen=True)
class DeviceEstimate:
    """A device's expected memory. `counted` is the sum of the kinds that a CPU run counts, each at
    its maximum. `peak` is the largest sum at one time, which also includes buffers, the batch,
    communication buckets, temporary tensors, and CUDA's workspaces.

    gathered, unreduced   only for fsdp: gathered parameters, and gradients not yet reduced
    buckets               DDP's gradient buckets, and rounded copies of them
    staging               at most, the memory through which the backend `local` moves tensors; it is
                          outside of torch's allocator, and not part of `counted` or `peak`
    """

    rank: int
    device: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int | None
    unreduced: int | None
    buckets: int | None
    counted: int
    peak: int | None
    staging: int = 0


@dataclass(frozen=True)
class Fit:
    """Whether the configuration fits a device.

    bytes                 the device's memory
    source                where that number comes from
    needed                the peak on the device that needs the most
    largest_batch_size    the largest batch that fits; if None, `no_largest` has the reason
    largest_batch_bytes   the peak in a trial of that batch
    """

    bytes: int
    source: str
    needed: int
    fits: bool
    largest_batch_size: int | None = None
    largest_batch_bytes: int | None = None
    no_largest: str | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """The estimate for all devices, or why there is none. `notes` lists what is not included."""

    devices: tuple[DeviceEstimate, ...] = ()
    not_estimated: str | None = None
    no_peak: str | None = None
    notes: tuple[str, ...] = ()
    fit: Fit | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MemoryEstimate:
        devices = tuple(DeviceEstimate(**device) for device in data["devices"])
        return cls(**data | {"devices": devices, "fit": data["fit"] and Fit(**data["fit"])})

    @property
    def peak(self) -> int | None:
        """Return the peak on the device that needs the most, including staging. Ranks may share a
        GPU."""
        peaks: dict[str, int] = {}
        for each in self.devices:
            if each.peak is None:
                return None
            peaks[each.device] = peaks.get(each.device, 0) + each.peak + each.staging
        return max(peaks.values(), default=None)
