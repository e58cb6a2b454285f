"""`Workload`: a model, its data, and its loss, in plain PyTorch without any parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from paralab.errors import UsageError

if TYPE_CHECKING:  # commands that only read runs import this module but not torch
    import torch
    from torch import nn
    from torch.utils.data import Dataset

    Batch = Any  # a tensor, or a tuple / list / dict of tensors whose dim 0 is the sample dim
    Data = Dataset[Any] | Callable[[int], Batch] | Batch


@dataclass
class Workload:
    """Everything needed to train a model on one device.

    model       a function that returns the `nn.Module`; paralab seeds torch before calling it
    data        tensors in memory (`(x, y)` or `{"input": x, "target": y}`, dim 0 = samples),
                a map-style Dataset, or a function `get_batch(n)` that returns n samples
    loss        `loss(output, target)`: the mean over the units that `weight` counts
    optimizer   `optimizer(parameters)`; default: `SGD(lr=0.01, momentum=0.9)`
    scheduler   `scheduler(optimizer)`; paralab calls its `step()` after each optimizer step
    weight      `weight(batch)`: the number of terms that this batch's loss averages over, such as
                its unpadded tokens; default: its samples. With correct weights, the losses of
                unequal parts of a batch add up to the batch's loss.
    unpack      `unpack(batch) -> (input, target)`; by default, a batch is a pair, a dict
                `{"input", "target"}`, or a tensor that is both input and target
    collate     the collate function for a Dataset, as in `DataLoader`
    split_points    submodules at which the model may be cut into stages; default: paralab finds
                them
    batch_size      the global batch size, unless the command sets it
    loader_workers  the number of DataLoader workers per rank, for a Dataset
    data_path   where the data comes from, which paralab writes to the manifest
    """

    model: Callable[[], nn.Module]
    data: Data
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    weight: Callable[[Batch], float] | None = None
    unpack: Callable[[Batch], tuple[Any, Any]] | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    split_points: Sequence[str] = ()
    batch_size: int = 64
    loader_workers: int = 0
    data_path: str = "in memory"
    name: str = ""


def as_workload(value: object, name: str) -> Workload:
    """Convert a user function's return value: a `Workload`, or a dict with the same names."""
    known = [field.name for field in fields(Workload)]
    if isinstance(value, Mapping):
        wrong = [str(key) for key in value if key not in known]
        missing = [key for key in ("model", "data", "loss") if key not in value]
        if wrong or missing:
            parts = [f"with the unknown {', '.join(wrong)}"] if wrong else []
            parts += [f"without {', '.join(missing)}"] if missing else []
            raise UsageError(
                f"The workload {name} returned a dict {' and '.join(parts)}.",
                fix="required: model, data, and loss; optional: " + ", ".join(known[3:]),
            )
        value = Workload(**value)
    if not isinstance(value, Workload):
        raise UsageError(
            f"The workload {name} returned {type(value).__name__}, not a workload.",
            fix="return paralab.Workload(model=..., data=..., loss=...) or a dict with these keys",
        )
    is_module = hasattr(value.model, "parameters") and not isinstance(value.model, type)
    if is_module or not callable(value.model):
        raise UsageError(
            f"The model of workload {name} is a {type(value.model).__name__}, but each rank must "
            "build its own model.",
            fix="model=a function or class that returns the nn.Module, e.g. "
            "model=lambda: MyModel(width=64)",
        )
    if not callable(value.loss):
        raise UsageError(
            f"The loss of workload {name} is {type(value.loss).__name__}, not a function.",
            fix="loss=a function of (output, target), e.g. torch.nn.functional.cross_entropy",
        )
    value.name = value.name or name
    return value
