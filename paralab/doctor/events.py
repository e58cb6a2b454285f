"""The events that watched ranks write: the schema of `paralab.observe`, field by field.

Every event has `t` (Unix seconds when it began), `step` (the optimizer steps that the rank had
finished), `site` (the line in the user's code, or None), and `seconds` if it took time. An operation
that raised has `error`. Long runs keep whole steps (see `observe.budget`): all events between two
kept `Step`s belong to the second.

"Sampled" fields exist only in steps 1 2 3 4 8 16 32 64 128 192 … (if kept). A digest is [norm, sum]
per tensor, None if there is no tensor; a norm of -1 is NaN, and -2 infinity. Equal tensors have equal
digests up to rounding: compare with a tolerance of 1e-5 of the norm.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from paralab.doctor.place import Place, Site

Digest = list[list[float] | None]


@dataclass(frozen=True)
class Event:
    t: float = 0.0
    step: int = 0
    site: Site | None = None
    seconds: float | None = None  # None if it is not timed, or not over
    error: str | None = None  # "RuntimeError: …"


@dataclass(frozen=True)
class Start(Event):
    """The process knows its rank. `world`: from the launcher. `cores`: that it may use.
    `trial_steps`: from `--try`."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    pid: int = 0
    host: str = ""
    argv: list[str] = field(default_factory=list)
    cwd: str = ""
    torch: str = ""
    threads: int = 1
    cores: int = 1
    gpus: int = 0
    trial_steps: int | None = None


@dataclass(frozen=True)
class Init(Event):
    """init_process_group; `group` and `ranks` are known once it returns. `address`: the rendezvous,
    if it comes from the environment. `agent`: the address of torchrun's agent, if that runs the
    rendezvous."""

    backend: str | None = None
    world: int | None = None
    timeout_seconds: float | None = None
    device_id: str | None = None
    address: str | None = None
    agent: str | None = None
    group: str | None = None
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Group(Event):
    """new_group. `group` is None on ranks outside it."""

    group: str | None = None
    backend: str | None = None
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Destroy(Event):
    """destroy_process_group."""

    group: str | None = None


@dataclass(frozen=True)
class Wrap(Event):
    """DDP(…) or DataParallel(…). `model`: its number, in the order of wrapping; None if it raised.
    Lists are in the order of named_parameters(). `digest`: of the parameters before wrapping (DDP
    overwrites them with those of rank 0). `seq`: the first and last number of its collectives in the
    default group. `ranks`: that DDP reduces over. `ignored`: names that it does not reduce."""

    ranks: list[int] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    kind: str = "ddp"  # or "data_parallel"
    model: int | None = None
    model_class: str = ""
    names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    trainable: list[bool] = field(default_factory=list)
    digest: Digest = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    batch_norms: int = 0
    sync_batch_norms: int = 0
    dropouts: int = 0  # with p > 0
    options: dict[str, Any] = field(default_factory=dict)  # static_graph, device_ids, …
    seq: list[int] | None = None


@dataclass(frozen=True)
class Forward(Event):
    """A forward of a wrapped model. `through`: "wrapper", or "module" for `model.module(…)`.
    `sync`: DDP will reduce these gradients (False inside no_sync). `size`: the first dimension of
    the first tensor. `random`: a checksum of the random state (sampled). `seq`: its collectives (for
    buffers), [n, n-1] for none."""

    model: int | None = None
    training: bool = True
    grad: bool = True
    sync: bool | None = None
    size: int | None = None
    autocast: str | None = None  # "cuda bfloat16"
    random: int | None = None
    through: str = "wrapper"
    seq: list[int] | None = None


@dataclass(frozen=True)
class Backward(Event):
    """A backward pass. Dictionaries have the number of a model, as text, as their key.

    loss          the value it started from, if it is one number (sampled on a GPU)
    lacking       trainable parameters without a gradient after it (sampled)
    unused_bytes  what DDP with find_unused_parameters found unused in the previous pass (sampled)
    laid          [name, shape, strides of the gradient, of DDP's bucket] where they differ (sampled)
    unsynced      models inside no_sync()
    reduced       it passes through a tensor that a collective overwrote
    weight        the factor from backward(gradient=…)
    grad_norm     of all gradients after it (sampled)
    seq           as in Forward
    """

    loss: float | str | None = None  # "nan", "inf" as text
    autocast: str | None = None
    lacking: dict[str, list[str]] | None = None
    unused_bytes: dict[str, int] | None = None
    laid: dict[str, list[list[Any]]] | None = None
    unsynced: list[int] = field(default_factory=list)
    reduced: bool = False
    weight: float | None = None
    grad_norm: float | None = None
    seq: list[int] | None = None

    @property
    def without_grad(self) -> list[str] | None:
        """Parameters without a gradient in all wrapped models; None if unknown."""
        if self.lacking is None:
            return None
        return [name for names in self.lacking.values() for name in names]


@dataclass(frozen=True)
class Step(Event):
    """An optimizer step. `number` counts this optimizer's steps from 1, and `step` includes it.
    `gradients` before it and `parameters` after it: digests of the parameters `names` (sampled)."""

    optimizer: int = 0
    optimizer_class: str = ""
    number: int = 0
    lr: list[float | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    gradients: Digest | None = None
    parameters: Digest | None = None


@dataclass(frozen=True)
class ZeroGrad(Event):
    """zero_grad. `optimizer`: None for a module's."""

    optimizer: int | None = None


@dataclass(frozen=True)
class Scheduled(Event):
    """A step of a learning-rate scheduler; `lr` after it."""

    scheduler_class: str = ""
    optimizer: int | None = None
    lr: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Clip(Event):
    """clip_grad_norm_ or clip_grad_value_. `most`: the limit. `norm`: before clipping."""

    most: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class Autocast(Event):
    """The start of `with autocast(…)`."""

    device: str = ""
    dtype: str = ""
    enabled: bool = True


@dataclass(frozen=True)
class Amp(Event):
    """A call of GradScaler. `op`: scale, unscale_, step, update. `skipped`: it skipped this step
    because of infinities. `scale`: after an update, or the factor of a loss."""

    op: str = ""
    enabled: bool = True
    optimizer: int | None = None
    skipped: bool | None = None
    scale: float | None = None


@dataclass(frozen=True)
class Loader(Event):
    """The start of a pass over a DataLoader; `epoch` counts its passes from 1. `batches`:
    len(loader). `samples`: len(dataset). `sampler_samples`: len(sampler). `replicas`, `replica`,
    `sampler_epoch`: of a DistributedSampler. `made`: the user's frames that created the loader,
    innermost first."""

    loader: int = 0
    epoch: int = 1
    batches: int | None = None
    batch_size: int | None = None
    samples: int | None = None
    dataset: str = ""
    iterable: bool = False
    sampler: str = ""
    batch_sampler: str = ""
    sampler_samples: int | None = None
    sampler_epoch: int | None = None
    replicas: int | None = None
    replica: int | None = None
    shuffle: bool | None = None
    sampler_drop_last: bool | None = None
    drop_last: bool = False
    workers: int = 0
    made: list[list[Any]] = field(default_factory=list)

    @property
    def made_at(self) -> Place | None:
        return Place(*self.made[0]) if self.made else None


@dataclass(frozen=True)
class Batch(Event):
    """A batch. `rows`: a checksum of each of its first 64 rows (sampled; only in CPU memory; None
    if unknown). `wait`: seconds until it arrived."""

    loader: int = 0
    epoch: int = 1
    batch: int = 1
    size: int | None = None
    wait: float = 0.0
    rows: list[int] | None = None
    shapes: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Epoch(Event):
    """The end of a pass over a DataLoader. A loop that is left early has none."""

    loader: int = 0
    epoch: int = 1
    batches: int = 0
    samples: int = 0


@dataclass(frozen=True)
class SetEpoch(Event):
    """DistributedSampler.set_epoch."""

    epoch: int = 0


@dataclass(frozen=True)
class Join(Event):
    """The start of `with model.join()`, which allows unequal numbers of batches."""


@dataclass(frozen=True)
class Seed(Event):
    """torch.manual_seed."""

    seed: int = 0


@dataclass(frozen=True)
class Threads(Event):
    """torch.set_num_threads."""

    threads: int = 1


@dataclass(frozen=True)
class Trainable(Event):
    """A parameter was frozen or unfrozen after wrapping."""

    name: str = ""
    trainable: bool = True


@dataclass(frozen=True)
class Moved(Event):
    """A wrapped model was moved or cast (.to, .cpu, .half, …). `before`, `after`: device and dtype
    of its first parameter."""

    model: int | None = None
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Collective(Event):
    """A collective, send, or receive that the user's code called. `seq`: [first, last] number in
    its group (an object needs several); None for sends and receives. `shape`, `dtype`: of the first
    tensor. `root`: src or dst. `in_graph`: autograd will go through the tensor. `value`: this rank's
    contribution, if it is one number in CPU memory."""

    op: str = ""
    group: str | None = None
    seq: list[int] | None = None
    shape: list[int] | None = None
    dtype: str | None = None
    device: str | None = None
    reduction: str | None = None
    root: int | None = None
    in_graph: bool = False
    asynchronous: bool = False
    value: float | None = None


@dataclass(frozen=True)
class Loss(Event):
    """A loss function. `valid`: the number of targets that are not `ignore_index`. `value`: its
    result, if it is one number. Both are sampled on a GPU, and None if unknown."""

    function: str = ""
    reduction: str = "mean"
    input_shape: list[int] = field(default_factory=list)
    target_shape: list[int] = field(default_factory=list)
    ignore_index: int | None = None
    valid: int | None = None
    grad: bool = True
    value: float | None = None


@dataclass(frozen=True)
class Save(Event):
    """torch.save of `count` tensors; the names of `prefixed` of them begin with "module."."""

    path: str | None = None
    keys: list[str] = field(default_factory=list)
    prefixed: int = 0
    count: int = 0


@dataclass(frozen=True)
class Load(Event):
    """torch.load."""

    path: str | None = None
    map_location: str | None = None


@dataclass(frozen=True)
class LoadState(Event):
    """Module.load_state_dict with `matched` of the module's `total` names."""

    model_class: str = ""
    model: int | None = None
    strict: bool = True
    matched: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    total: int = 0


@dataclass(frozen=True)
class Reduced(Event):
    """What DDP measured in one of its first passes, in seconds. `compute`: the backward pass.
    `transfer`: from the start of the first bucket to the end of the last one, including waiting for
    other ranks. `hidden`: their overlap. `buckets`: bytes, in order."""

    model: int | None = None
    iteration: int = 0
    compute: float = 0.0
    transfer: float = 0.0
    hidden: float = 0.0
    buckets: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Pipeline(Event):
    """One step of a torch.distributed.pipelining schedule. `size`, `target_size`, `output_size`:
    the rows of the batch, target, and output, if this rank has them. `made`: where the schedule was
    created."""

    schedule: str = ""
    microbatches: int = 0
    stages: int = 0
    stage: int | None = None
    size: int | None = None
    target_size: int | None = None
    output_size: int | None = None
    made: list[list[Any]] = field(default_factory=list)

    @property
    def made_at(self) -> Place | None:
        return Place(*self.made[0]) if self.made else None


@dataclass(frozen=True)
class Raised(Event):
    """An uncaught exception. `stack`: the user's frames, innermost first. `text`: as Python prints
    it."""

    type: str = ""
    message: str = ""
    stack: list[list[Any]] = field(default_factory=list)
    text: str = ""

    @property
    def place(self) -> Place | None:
        return Place(*self.stack[0]) if self.stack else None


@dataclass(frozen=True)
class Exit(Event):
    """sys.exit or os._exit was called."""

    code: int = 0
    call: str = "sys.exit"


@dataclass(frozen=True)
class End(Event):
    """The program ended by itself, possibly after an exception."""

    how: str = "finished"


@dataclass(frozen=True)
class Held(Event):
    """A trial: the rank has finished its steps and waits for the others."""


@dataclass(frozen=True)
class Replaced(Event):
    """A trial: something was replaced, for example a missing GPU."""

    what: str = ""
    by: str = ""


@dataclass(frozen=True)
class Cost(Event):
    """The share of this rank's time that watching took since the first step, by its own clock. From
    now on, one step in `every` is kept."""

    share: float = 0.0
    every: int = 8


@dataclass(frozen=True)
class Off(Event):
    """Watching stopped after an error in paralab: nothing is known from here on."""


KINDS: dict[str, type[Event]] = {
    "reduced": Reduced, "cost": Cost,
    "start": Start, "init": Init, "group": Group, "destroy": Destroy, "wrap": Wrap, "forward": Forward, "backward": Backward,
    "step": Step, "zero_grad": ZeroGrad, "scheduler": Scheduled, "clip": Clip, "autocast": Autocast, "amp": Amp, "loader": Loader,
    "batch": Batch, "epoch": Epoch, "set_epoch": SetEpoch, "seed": Seed, "join": Join, "collective": Collective, "loss": Loss,
    "save": Save, "load": Load, "load_state": LoadState, "pipeline": Pipeline, "exception": Raised, "exit": Exit, "end": End,
    "held": Held, "threads": Threads, "trainable": Trainable, "moved": Moved,
    "replaced": Replaced, "off": Off,
}  # fmt: skip
_FIELDS = {kind: {f.name for f in fields(kind)} for kind in KINDS.values()}


def typed(event: dict[str, Any], sites: dict[int, Site]) -> Event | None:
    """Convert an event; None if a newer paralab wrote it."""
    kind = KINDS.get(event.get("event", ""))
    if kind is None:
        return None
    known = {name: value for name, value in event.items() if name in _FIELDS[kind]}
    return kind(**{**known, "site": sites.get(event.get("site"))})  # type: ignore[arg-type]
