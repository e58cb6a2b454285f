"""The events that observed ranks write, as the rules read them: this file is the schema of
`paralab.observe`, field by field.

Every event has `t` (Unix seconds when it began), `step` (the optimizer steps that this rank had
made by then), `site` (the place in the user's code, None where there is none) and, where it took
time, `seconds`. An operation that raised has `error`. Of long runs whole steps are kept (the first
64, then one in 8 or rarer, see `observe.budget`): all events between two kept `Step`s belong to the
second. Digests are of sampled steps only (1 2 3 4 8 16 32 64 128 192 …, of those that are kept) and
give [norm, sum] per tensor, None for a tensor that is not there; a norm of -1 stands for NaN, -2
for infinity. Equal tensors give equal digests up to rounding: compare with a tolerance of 1e-5 of
the norm.
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
    seconds: float | None = None  # None: it took no time worth noting, or it is not over
    error: str | None = None  # "RuntimeError: …": it raised


@dataclass(frozen=True)
class Start(Event):
    """The rank is known. `world`: as the launcher says. `cores`: that this process may use.
    `trial_steps`: of `--try`."""

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
    """init_process_group; the last two are known once it has returned. `address`: where it meets
    the others, if the environment says so. `agent`: where torchrun's agent keeps the meeting, if it
    does."""

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
    """new_group. `group` is None on ranks that are not of it."""

    group: str | None = None
    backend: str | None = None
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Destroy(Event):
    """destroy_process_group."""

    group: str | None = None


@dataclass(frozen=True)
class Wrap(Event):
    """DDP(…) or DataParallel(…). `model`: its number, in the order of wrapping (None if wrapping
    raised). Lists are in the order of named_parameters(); `digest` is of the parameters before the
    wrapper has touched them (DDP copies those of rank 0 over them). `seq`: the first and last
    number of the collectives it made in the default group. `ranks`: between which DDP reduces; not
    what is `ignored`, by its name."""

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
    options: dict[str, Any] = field(
        default_factory=dict
    )  # find_unused_parameters, static_graph, broadcast_buffers, device_ids …
    seq: list[int] | None = None


@dataclass(frozen=True)
class Forward(Event):
    """A forward of a wrapped model. `through`: "wrapper", or "module": past the wrapper, by
    `model.module(…)`. `sync`: DDP will reduce the gradients of this pass (False inside no_sync).
    `size`: the first dimension of the first tensor. `random`: a checksum of the random stream at
    this moment (sampled). `seq`: collectives made meanwhile (buffers), [n, n-1] for none."""

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
    """`loss`: the value it started from, if it is one number (on CPU in all steps that are kept, on
    a GPU sampled). `lacking`: trainable parameters of each wrapped model (its number, as text) that
    have no gradient after it (sampled; None: not looked). `unused_bytes`: what DDP itself has found
    unused in the pass before, of each model with find_unused_parameters (sampled). `laid`: [name,
    shape, strides of the gradient, of DDP's bucket] where the two differ, of each model (sampled).
    `unsynced`: models that are inside no_sync() at this moment. `reduced`: a tensor that a
    collective has overwritten lies on the way back. `weight`: what backward(gradient=…) multiplies
    it with. `grad_norm`: of all gradients together after it (sampled). `seq`: as in Forward."""

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
        """Of all wrapped models together."""
        return (
            None
            if self.lacking is None
            else [name for names in self.lacking.values() for name in names]
        )


@dataclass(frozen=True)
class Step(Event):
    """An optimizer's step; `number` counts that optimizer's, from 1, and `step` of this event
    includes it. `gradients`: digest before it, `parameters`: after it, both of the parameters
    `names` (sampled)."""

    optimizer: int = 0
    optimizer_class: str = ""
    number: int = 0
    lr: list[float | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    gradients: Digest | None = None
    parameters: Digest | None = None


@dataclass(frozen=True)
class ZeroGrad(Event):
    """`optimizer`: None where a module's gradients were cleared."""

    optimizer: int | None = None


@dataclass(frozen=True)
class Scheduled(Event):
    """A learning-rate scheduler's step; `lr` after it."""

    scheduler_class: str = ""
    optimizer: int | None = None
    lr: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Clip(Event):
    """clip_grad_norm_ or clip_grad_value_. `most`: what was asked for, `norm`: what was found."""

    most: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class Autocast(Event):
    """A `with autocast(…)` is entered."""

    device: str = ""
    dtype: str = ""
    enabled: bool = True


@dataclass(frozen=True)
class Amp(Event):
    """A call of GradScaler. `op`: scale, unscale_, step, update. `skipped`: this step was left out
    (infinities). `scale`: after an update, or that a loss is multiplied with."""

    op: str = ""
    enabled: bool = True
    optimizer: int | None = None
    skipped: bool | None = None
    scale: float | None = None


@dataclass(frozen=True)
class Loader(Event):
    """A pass over a DataLoader begins; `epoch` counts the passes over this loader, from 1.
    `batches`: len(loader). `samples`: len(dataset). `sampler_samples`: len(sampler). `replicas`,
    `replica`, `sampler_epoch`: of a DistributedSampler. `made`: the user's frames where the loader
    was made, innermost first."""

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
    """A batch was taken. `rows`: a checksum of each of its first 64 rows (sampled; None where not
    looked; of a tensor on the host only). `wait`: seconds until it was there."""

    loader: int = 0
    epoch: int = 1
    batch: int = 1
    size: int | None = None
    wait: float = 0.0
    rows: list[int] | None = None
    shapes: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Epoch(Event):
    """A pass over a DataLoader has come to its end (not written when the loop was left early)."""

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
    """A `with model.join()` is entered: unequal numbers of batches are provided for."""


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
    """A parameter of a wrapped model was frozen or unfrozen after wrapping."""

    name: str = ""
    trainable: bool = True


@dataclass(frozen=True)
class Moved(Event):
    """A wrapped model was moved or cast (.to, .cpu, .half …); `before` and `after`: device and
    dtype of its first parameter."""

    model: int | None = None
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Collective(Event):
    """A collective, or a send or receive, that the user's code called. `seq`: [first, last] of its
    numbers in its group (an object is sent in several); None for sends and receives. `shape`,
    `dtype`: of the (first) tensor. `root`: src or dst. `in_graph`: the tensor is a result that
    autograd will go back through. `value`: what this rank gave, where it is one number on the
    host."""

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
    """A loss function. `valid`: targets that are not `ignore_index`, and `value`: its result, if it
    is one number (both on CPU in all steps that are kept, on a GPU sampled; None where not
    looked)."""

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
    """torch.save. `prefixed`: how many of its `count` tensors have names that begin with
    "module."."""

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
    """Module.load_state_dict. `matched` of `total` names of the module were given."""

    model_class: str = ""
    model: int | None = None
    strict: bool = True
    matched: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    total: int = 0


@dataclass(frozen=True)
class Reduced(Event):
    """What DDP measured of one of its first passes. `compute`, `transfer`: seconds of the backward
    pass, and from its first bucket on its way to the last one's arrival, waiting for other ranks
    included; `hidden`: both at once. `buckets`: bytes, in the order of sending."""

    model: int | None = None
    iteration: int = 0
    compute: float = 0.0
    transfer: float = 0.0
    hidden: float = 0.0
    buckets: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Pipeline(Event):
    """One step of a torch.distributed.pipelining schedule. `size`: the batch, where this rank was
    given one. `target_size`, `output_size`: the same of its target and of its output, where it has
    them. `made`: where the schedule was made."""

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
    """An exception that nobody caught. `stack`: the user's frames, innermost first. `text`: as
    Python prints it."""

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
    """The program came to its end, in order (after an exception, too)."""

    how: str = "finished"


@dataclass(frozen=True)
class Held(Event):
    """A trial: the rank has made its steps and waits to be ended."""


@dataclass(frozen=True)
class Replaced(Event):
    """A trial without a GPU: something was replaced so that it could run."""

    what: str = ""
    by: str = ""


@dataclass(frozen=True)
class Cost(Event):
    """What observing this rank has taken of its time since the first step, by its own measurement;
    from here on one step in `every` is kept."""

    share: float = 0.0
    every: int = 8


@dataclass(frozen=True)
class Off(Event):
    """The observation has switched itself off after an error of its own; nothing is known from here
    on."""


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
    """An event as it was read, in its type; None for one that a newer paralab has written."""
    kind = KINDS.get(event.get("event", ""))
    if kind is None:
        return None
    known = {name: value for name, value in event.items() if name in _FIELDS[kind]}
    return kind(**{**known, "site": sites.get(event.get("site"))})  # type: ignore[arg-type]
