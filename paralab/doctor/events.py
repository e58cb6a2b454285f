"""The events that watched ranks write: the schema of `paralab.observe`, field by field.

Every event has `t` (Unix seconds when it began), `step` (the number of finished optimizer steps),
and `site` (the line in the user's code, or None). It has `seconds` if it took time, and `error` if
it raised an exception. Long runs keep whole steps (see `observe.budget`): all events between two
kept `Step`s belong to the second.

"Sampled" fields exist only in steps 1 2 3 4 8 16 32 64 128 192 … (if kept). A digest is [norm, sum]
per tensor, or None if there is no tensor. A norm of -1 means NaN, and -2 means infinity. Equal
tensors have equal digests up to rounding, so compare with a tolerance of 1e-5 of the norm.
"""

import re
from functools import cache
from typing import Any

import msgspec

from paralab.doctor.place import Place, Site

Digest = list[list[float] | None]


def _tag(name: str) -> str:
    """Return the tag of an event class: `zero_grad` for ZeroGrad."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=_tag):
    t: float = 0.0
    step: int = 0
    site: Site | None = None
    seconds: float | None = None  # None if it is not timed or has not ended
    error: str | None = None  # "RuntimeError: …"


class Start(Event, frozen=True):
    """The process has learned its rank. `cores` is the number of cores that it may use."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    pid: int = 0
    host: str = ""
    torch: str = ""
    threads: int = 1
    cores: int = 1
    gpus: int = 0


class Init(Event, frozen=True):
    """A call to init_process_group. `group` and `ranks` are known once it returns. `address` is the
    rendezvous address, if it comes from the environment. `agent` is the address of torchrun's
    agent, if the agent hosts the rendezvous."""

    backend: str | None = None
    world: int | None = None
    timeout_seconds: float | None = None
    address: str | None = None
    agent: str | None = None
    group: str | None = None
    ranks: list[int] = []


class Group(Event, frozen=True):
    """A call to new_group. `group` is None on ranks outside the group."""

    group: str | None = None
    backend: str | None = None
    ranks: list[int] = []


class Destroy(Event, frozen=True):
    """A call to destroy_process_group."""

    group: str | None = None


class Wrap(Event, frozen=True):
    """A model was wrapped in DDP or DataParallel. `model` counts wrapped models from 0; it is None
    if wrapping failed. Lists are in the order of named_parameters(). `seq` is the first and last
    number of the wrapper's collectives in the default group. `ranks` are the ranks in DDP's process
    group. `ignored` lists parameters that DDP does not reduce."""

    ranks: list[int] = []
    ignored: list[str] = []
    kind: str = "ddp"  # or "data_parallel"
    model: int | None = None
    model_class: str = ""
    names: list[str] = []
    shapes: list[list[int]] = []
    trainable: list[bool] = []
    buffers: list[str] = []
    batch_norms: int = 0
    sync_batch_norms: int = 0
    dropouts: int = 0  # number of dropout layers with p > 0
    options: dict[str, Any] = {}  # static_graph, device_ids, …
    seq: list[int] | None = None


class Forward(Event, frozen=True):
    """A forward pass of a wrapped model. `through` is "wrapper", or "module" for `model.module(…)`.
    `sync` is True if DDP will reduce the gradients (False inside no_sync). `size` is the first
    dimension of the first tensor. `random` is a checksum of the random state (sampled). `seq` has
    the numbers of the collectives that broadcast buffers, or is [n, n-1] if there are none."""

    model: int | None = None
    training: bool = True
    grad: bool = True
    sync: bool | None = None
    size: int | None = None
    autocast: str | None = None  # "cuda bfloat16"
    random: int | None = None
    through: str = "wrapper"
    seq: list[int] | None = None


class Backward(Event, frozen=True):
    """A backward pass. The keys of dictionaries are model numbers, as text.

    loss          the value of the loss, if it is one number (sampled on a GPU)
    lacking       trainable parameters without a gradient after the pass (sampled)
    unused_bytes  bytes of parameters that DDP found unused in the previous pass (sampled)
    laid          [name, shape, gradient strides, bucket strides] where the strides differ (sampled)
    unsynced      models inside no_sync()
    reduced       whether the pass goes through a tensor that a collective overwrote
    weight        the factor from backward(gradient=…)
    grad_norm     the norm of all gradients after the pass (sampled)
    seq           as in Forward
    """

    loss: float | str | None = None  # "nan", "inf" as text
    autocast: str | None = None
    lacking: dict[str, list[str]] | None = None
    unused_bytes: dict[str, int] | None = None
    laid: dict[str, list[list[Any]]] | None = None
    unsynced: list[int] = []
    reduced: bool = False
    weight: float | None = None
    grad_norm: float | None = None
    seq: list[int] | None = None

    @property
    def without_grad(self) -> list[str] | None:
        if self.lacking is None:
            return None
        return [name for names in self.lacking.values() for name in names]


class Step(Event, frozen=True):
    """An optimizer step. `number` counts this optimizer's steps from 1, and `step` includes it.
    `gradients` are digests before the step, and `parameters` are digests after it, both in the
    order of `names` (sampled)."""

    optimizer: int = 0
    number: int = 0
    lr: list[float | None] = []
    names: list[str] = []
    gradients: Digest | None = None
    parameters: Digest | None = None


class ZeroGrad(Event, frozen=True):
    """A call to zero_grad. `optimizer` is None for Module.zero_grad."""

    optimizer: int | None = None


class Scheduled(Event, frozen=True, tag="scheduler"):
    """A learning-rate scheduler's step. `lr` is the learning rate after the step."""

    optimizer: int | None = None
    lr: list[float | None] = []


class Clip(Event, frozen=True):
    """A call to clip_grad_norm_ or clip_grad_value_. `most` is the limit. `norm` is the norm before
    clipping."""

    most: float | None = None
    norm: float | None = None


class Autocast(Event, frozen=True):
    """The start of `with autocast(…)`."""

    dtype: str = ""
    enabled: bool = True


class Amp(Event, frozen=True):
    """A call to a GradScaler method. `op` is scale, unscale_, step, or update. `skipped` is True if
    infinities made the scaler skip this step. `scale` is the scale after an update, or the factor
    applied to a loss."""

    op: str = ""
    enabled: bool = True
    optimizer: int | None = None
    skipped: bool | None = None
    scale: float | None = None

    def scale_after(self, scale: float | None) -> float | None:
        """Return the scale of the gradients after this call, or None if they are not scaled."""
        if not self.enabled:
            return scale
        if self.op == "scale":
            return self.scale or 0.0
        return None if self.op in ("unscale_", "update", "step") else scale


class Loader(Event, frozen=True):
    """The start of a pass over a DataLoader. `epoch` counts the passes over this loader from 1.
    `batches` is len(loader), `samples` is len(dataset), and `sampler_samples` is len(sampler). A
    distributed sampler has `replicas`, its own number `replica`, and `sampler_epoch`. `made` lists
    the user's frames that created the loader, innermost first."""

    loader: int = 0
    epoch: int = 1
    batches: int | None = None
    batch_size: int | None = None
    samples: int | None = None
    dataset: str = ""
    iterable: bool = False
    sampler: str = ""
    sampler_samples: int | None = None
    sampler_epoch: int | None = None
    replicas: int | None = None
    replica: int | None = None
    shuffle: bool | None = None
    workers: int = 0
    made: list[list[Any]] = []

    @property
    def made_at(self) -> Place | None:
        return Place(*self.made[0]) if self.made else None


class Batch(Event, frozen=True):
    """A batch. `rows` has a checksum of each of its first 64 rows (sampled; only in CPU memory;
    None if unknown). `wait` is how many seconds the loop waited for the batch."""

    loader: int = 0
    epoch: int = 1
    batch: int = 1
    size: int | None = None
    wait: float = 0.0
    rows: list[int] | None = None


class Epoch(Event, frozen=True):
    """The end of a pass over a DataLoader. A loop that ends early has no such event."""

    loader: int = 0
    epoch: int = 1
    batches: int = 0
    samples: int = 0


class SetEpoch(Event, frozen=True):
    """A call to DistributedSampler.set_epoch."""

    epoch: int = 0


class Join(Event, frozen=True):
    """The start of `with model.join()`, which allows unequal numbers of batches."""


class Seed(Event, frozen=True):
    """A call to torch.manual_seed."""

    seed: int = 0


class Threads(Event, frozen=True):
    """A call to torch.set_num_threads."""

    threads: int = 1


class Trainable(Event, frozen=True):
    """A parameter was frozen or unfrozen after wrapping."""

    name: str = ""
    trainable: bool = True


class Moved(Event, frozen=True):
    """A wrapped model was moved or cast (.to, .cpu, .half, …). `before` and `after` are the device
    and dtype of its first parameter."""

    model: int | None = None
    before: str = ""
    after: str = ""


class Collective(Event, frozen=True):
    """A collective, send, or receive that the user's code called. `peer` is the root, or the rank at
    the other end. `seq` is its [first, last] number in its group (an object collective runs
    several); it is None for sends and receives. `shape` and `dtype` describe the first tensor. `in_graph` is True if autograd will go through the tensor.
    `value` is this rank's contribution, if it is one number in CPU memory."""

    op: str = ""
    group: str | None = None
    peer: int | None = None
    seq: list[int] | None = None
    shape: list[int] | None = None
    dtype: str | None = None
    reduction: str | None = None
    in_graph: bool = False
    asynchronous: bool = False
    value: float | None = None


class Loss(Event, frozen=True):
    """A call to a loss function. `valid` counts the targets that are not `ignore_index`. `value` is
    the result, if it is one number. Both are sampled on a GPU, and None if unknown."""

    reduction: str = "mean"
    target_shape: list[int] = []
    valid: int | None = None
    grad: bool = True
    value: float | None = None


class Save(Event, frozen=True):
    """A call to torch.save. `prefixed` counts the tensors whose names begin with "module."."""

    path: str | None = None
    prefixed: int = 0


class Load(Event, frozen=True):
    """A call to torch.load."""

    path: str | None = None
    map_location: str | None = None


class LoadState(Event, frozen=True):
    """A call to Module.load_state_dict. The state dict has `matched` of the module's `total`
    names."""

    model_class: str = ""
    model: int | None = None
    strict: bool = True
    matched: int = 0
    missing: list[str] = []
    unexpected: list[str] = []
    total: int = 0


class Reduced(Event, frozen=True):
    """What DDP measured in one of its first passes, in seconds. `compute` is the time of the
    backward pass. `transfer` is the time from the start of the first bucket to the end of the last
    one, including waiting for other ranks. `hidden` is the overlap of the two. `buckets` lists the
    bytes of each bucket, in order."""

    model: int | None = None
    iteration: int = 0
    compute: float = 0.0
    transfer: float = 0.0
    hidden: float = 0.0
    buckets: list[int] = []


class Pipeline(Event, frozen=True):
    """One step of a torch.distributed.pipelining schedule. `size` is the number of rows in the
    batch, if this rank has the batch. `made` is where the schedule was created."""

    schedule: str = ""
    microbatches: int = 0
    stages: int = 0
    stage: int | None = None
    size: int | None = None
    made: list[list[Any]] = []

    @property
    def made_at(self) -> Place | None:
        return Place(*self.made[0]) if self.made else None


class Raised(Event, frozen=True, tag="exception"):
    """An uncaught exception. `stack` lists the user's frames, innermost first. `text` is the
    traceback as Python prints it."""

    type: str = ""
    message: str = ""
    stack: list[list[Any]] = []
    text: str = ""

    @property
    def place(self) -> Place | None:
        return Place(*self.stack[0]) if self.stack else None


class Exit(Event, frozen=True):
    """sys.exit or os._exit was called."""

    code: int = 0
    call: str = "sys.exit"


class End(Event, frozen=True):
    """The program ended on its own, possibly after an exception."""

    how: str = "finished"


class Held(Event, frozen=True):
    """In a trial, the rank has finished its steps and waits for the others."""


class Replaced(Event, frozen=True):
    """Something that a trial replaced, such as a missing GPU."""

    what: str = ""
    by: str = ""


class Cost(Event, frozen=True):
    """Watching took this share of the rank's time since the first step, by the rank's own clock.
    From now on, one step in `every` is kept."""

    share: float = 0.0
    every: int = 8


class Off(Event, frozen=True):
    """Watching stopped because of an error in paralab. Later operations are unknown."""


@cache  # the pre-commit hook imports this file without msgspec
def _kinds() -> dict[str | int | None, type[Event]]:
    return {kind.__struct_config__.tag: kind for kind in Event.__subclasses__()}


def typed(event: dict[str, Any], sites: dict[int, Site]) -> Event | None:
    """Convert an event. Return None if a newer paralab wrote it. Values are not checked: a user's
    sampler may have an `epoch` of any type."""
    kind = _kinds().get(event.get("event", ""))
    if kind is None:
        return None
    known = {name: event[name] for name in kind.__struct_fields__ if name in event}
    return kind(**{**known, "site": sites.get(event.get("site", -1))})
