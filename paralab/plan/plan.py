"""`Plan`: a configuration fully resolved for a machine and a workload, with a reason per choice."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from paralab.plan.axes import Axis
from paralab.plan.grid import Cell, Device
from paralab.plan.lossy import Lossy, Simulation
from paralab.plan.memory_trial import MemoryEstimate
from paralab.plan.option import options_of
from paralab.plan.request import Request
from paralab.workload.expert_plan import ExpertLayer, ExpertPlan
from paralab.workload.reference import PICKLED
from paralab.workload.sequence_plan import SequencePlan, SplitBlock
from paralab.workload.tensor_group import TensorGroup, TensorPlan

T = TypeVar("T")


@dataclass(frozen=True)
class Reason:
    """One choice and the reason for it."""

    choice: str
    value: str
    because: str


class Reasons(list[Reason]):
    """A plan's choices, in the order in which they were made."""

    def add(self, choice: str, value: object, because: str) -> None:
        self.append(Reason(choice, str(value), because))

    def choose(self, choice: str, given: T | None, default: T, because: str) -> T:
        """Return the user's value if it is given, otherwise the default, and record the reason."""
        chosen, why = (default, because) if given is None else (given, "requested")
        self.add(choice, chosen, why)
        return chosen


@dataclass(frozen=True)
class RankPlan:
    """One process: its devices, and how many samples of a full batch each device processes.

    replica  the number of its replica if each replica has its own process, otherwise 0
    stage    the number of its stage if each stage has its own process, otherwise None
    node     the host name of its node, if another launcher started the ranks
    shard    the number of its shard if each layer is split, otherwise None
    """

    rank: int
    local_rank: int
    devices: tuple[Device, ...]
    samples_per_step: int
    split: tuple[int, ...]
    replica: int = 0
    stage: int | None = None
    node: str = ""
    shard: int | None = None

    def counts(self, stages: int) -> bool:
        """Return whether this rank reports the loss. With one process per stage, only the last
        stage does. All shards compute the same loss, so only the first one reports it."""
        return self.stage in (None, stages - 1) and not self.shard

    @property
    def cell(self) -> Cell:
        """This rank's place in the grid of ranks."""
        return self.replica, self.stage or 0, self.shard or 0

    @property
    def random_stream(self) -> int:
        """The number of this rank's random stream. Shards of one replica draw the same numbers."""
        return self.rank - (self.shard or 0)


@dataclass(frozen=True)
class Stage:
    """A contiguous part of the model, which begins at `start` and has these modules' parameters."""

    start: str
    modules: tuple[str, ...]
    layers: int
    seconds: float
    parameter_bytes: int
    activation_bytes_per_sample: float | None = None


@dataclass(frozen=True)
class Plan:
    strategy: str
    workload: str
    replicas: int
    stages: int
    batch_size: int
    accumulate: int
    micro_batches: int
    precision: str
    loss_scale: float | None
    bucket_mb: float | None
    find_unused: bool
    steps: int | None
    epochs: int | None
    samples: int | None
    num_steps: int
    seed: int
    device: str
    placement: str
    threads_per_device: int
    backend: str | None
    ranks: tuple[RankPlan, ...]
    stage_parts: tuple[Stage, ...]
    arithmetic: str
    environment: dict[str, str]
    reasons: tuple[Reason, ...]
    remarks: tuple[str, ...]
    differences: tuple[str, ...]
    # We added these fields later. Their defaults keep older run folders readable.
    scaler: bool = False
    bucket_view: bool = False
    static_graph: bool = False
    sync_every_pass: bool = False
    prefix: str | None = None
    # Submodules that fsdp gathers one at a time. All other parameters are gathered together.
    shard_units: tuple[str, ...] = ()
    # The schedule, if each stage has its own process; None if a replica's stages share a process.
    schedule: str | None = None
    chunks: int = 1  # model parts per stage; part i is on stage i mod stages
    optimizer_bytes_per_byte: float | None = None  # optimizer state per byte of parameters
    draws: bool = False  # whether the forward pass draws random numbers
    staging_bytes: int = 0  # of the backend `local`, per rank and process group
    mps: bool = False  # whether processes share a GPU through MPS
    zero: int | None = None  # what fsdp shards: 1, 2, or 3
    shard_groups: int = 1  # groups of replicas that each hold all of fsdp's shards
    recompute: str | None = None  # the recomputation mode, full or selective
    recomputed: tuple[str, ...] = ()
    compile: bool = False
    compiled: tuple[str, ...] = ()  # names of the compiled blocks
    shards: int = 1
    tensor_plan: TensorPlan | None = None  # layers that are split over the shards
    sequence_parallel: bool = False  # the shards also split the tokens between these layers
    sequence_plan: SequencePlan | None = None  # blocks that split sequences over the shards
    expert_plan: ExpertPlan | None = None  # layers whose experts are divided among the shards
    axes: tuple[Axis, ...] = ()  # axes of the grid of ranks, with the collectives along each
    control: tuple[str, ...] = ()  # causes of legitimate differences that `verify` removes
    memory: MemoryEstimate | None = None  # set only for a single run
    compress: str | None = None
    powersgd_rank: int = 1
    sync_every: int | None = None  # steps between parameter averages, if any
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    simulation: Simulation | None = None  # the lossy algorithm that a single device simulates

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def shards_parameters(self) -> bool:
        """Whether FSDP2 shards the parameters. ZeRO-1 shards only the optimizer state."""
        return self.zero in (2, 3)

    @property
    def shards_per_parameter(self) -> int:
        """The number of fsdp's shards."""
        return self.replicas // self.shard_groups if self.shards_parameters else 1

    @property
    def no_scaler(self) -> bool:
        return self.precision == "fp16" and not self.scaler

    @property
    def rank_replicas(self) -> int:
        """The number of replicas that have their own processes."""
        return 1 + max(rank.replica for rank in self.ranks)

    @property
    def lossy(self) -> Lossy:
        return Lossy(**{field.name: getattr(self, field.name) for field in fields(Lossy)})

    @property
    def num_devices(self) -> int:
        return len({device.name for rank in self.ranks for device in rank.devices})

    @property
    def cuts(self) -> list[str]:
        """Where the stages begin. Cuts can depend on timings, so they may differ between runs."""
        return [part.start for part in self.stage_parts]

    @property
    def training(self) -> dict[str, Any]:
        """The values that must match when a run resumes. They do not depend on its devices."""
        # A function from a notebook is stored in a different file each time.
        workload = "a function" if self.workload.startswith(PICKLED) else self.workload
        return {
            "workload": workload,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "precision": self.precision,
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        given = _to_tuples(data)
        for rank in given["ranks"]:
            rank["devices"] = tuple(Device(**device) for device in rank["devices"])
        given["ranks"] = tuple(RankPlan(**rank) for rank in given["ranks"])
        given["stage_parts"] = tuple(Stage(**stage) for stage in given["stage_parts"])
        if split := given.get("tensor_plan"):
            groups = tuple(TensorGroup(**group) for group in split["groups"])
            more = {"groups": groups, "sequence": _sequence_plan(split.get("sequence"))}
            given["tensor_plan"] = TensorPlan(**split | more)
        given["sequence_plan"] = _sequence_plan(given.get("sequence_plan"))
        if split := given.get("expert_plan"):
            layers = tuple(ExpertLayer(**layer) for layer in split["layers"])
            given["expert_plan"] = ExpertPlan(**{**split, "layers": layers})
        given["axes"] = tuple(Axis(**axis) for axis in given.get("axes", ()))
        given["reasons"] = tuple(Reason(**reason) for reason in given["reasons"])
        if simulation := given.get("simulation"):
            given["simulation"] = Simulation(**simulation)
        if memory := given.get("memory"):
            given["memory"] = MemoryEstimate.from_json(memory)
        return cls(**given)


def _to_tuples(value: Any) -> Any:
    """Turn lists from a JSON file back into tuples."""
    if isinstance(value, dict):
        return {key: _to_tuples(item) for key, item in value.items()}
    return tuple(map(_to_tuples, value)) if isinstance(value, list | tuple) else value


def label(configuration: Request | Plan) -> str:
    """Label a configuration with its distinctive options: `hybrid ×2 · 2 stages · bf16`.

    Every table, page, and folder uses this label. It leaves out options that were not given or have
    their usual value. A plan has a value for each option, so its label also contains automatic
    choices.
    """
    words = [configuration.strategy]
    for each in options_of(Request):
        if each.label is None or not each.applies_to(configuration.strategy):
            continue

        given, usual = getattr(configuration, each.name), each.usual_for(configuration.strategy)
        value = usual if given is None else given
        if value in (None, False) or (value == usual and not each.always):
            continue

        words.append(each.label(value))
    return " · ".join(word for word in words if word).replace(" · ×", " ×")


def _sequence_plan(data: dict[str, Any] | None) -> SequencePlan | None:
    if data is None:
        return None
    return SequencePlan(**data | {"blocks": tuple(SplitBlock(**each) for each in data["blocks"])})
