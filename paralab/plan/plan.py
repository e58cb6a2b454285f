"""`Plan`: a request resolved against a machine and a workload, frozen and complete, with a reason
per choice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paralab.plan.grid import Device
from paralab.workload.reference import PICKLED


@dataclass(frozen=True)
class Reason:
    """One choice that was made, and why."""

    choice: str
    value: str
    because: str


@dataclass(frozen=True)
class RankPlan:
    """What one process does: its devices, and how many samples of a full batch each of them trains
    on."""

    rank: int
    local_rank: int
    devices: tuple[Device, ...]
    samples_per_step: int
    split: tuple[int, ...]
    replica: int = 0  # which of the replicas that are processes of their own; 0 where there is one
    stage: int | None = None  # where a stage is a process of its own: which one
    node: str = ""  # the host's name, where something else than paralab has launched the ranks

    def counts(self, stages: int) -> bool:
        """Do this rank's loss and samples count? Of a pipeline over processes, only those of its
        last stage."""
        return self.stage is None or self.stage == stages - 1


@dataclass(frozen=True)
class Stage:
    """A contiguous part of the model: it begins when `start` is called and owns the parameters of
    `modules`."""

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
    # Added after the first run folders were written, which must stay readable: these have defaults.
    scaler: bool = False
    bucket_view: bool = False
    static_graph: bool = False
    sync_every_pass: bool = False
    prefix: str | None = None
    shard_units: tuple[
        str, ...
    ] = ()  # sub-modules that fsdp gathers one at a time; what is left is gathered with the whole model
    schedule: str | None = (
        None  # a process per stage, in this order; None: the stages of a replica share a process
    )
    chunks: int = 1  # parts of the model per stage; part i is on stage i mod stages
    optimizer_bytes_per_byte: float | None = None  # the optimizer's state per byte of parameters
    draws: bool = False  # the forward draws random numbers
    control: tuple[
        str, ...
    ] = ()  # of a proof: what is held still, so that nothing but the strategy can make a difference

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def no_scaler(self) -> bool:
        return self.precision == "fp16" and not self.scaler

    @property
    def rank_replicas(self) -> int:
        """Replicas that are processes of their own."""
        return 1 + max(rank.replica for rank in self.ranks)

    @property
    def num_devices(self) -> int:
        return len({device.name for rank in self.ranks for device in rank.devices})

    @property
    def cuts(self) -> list[str]:
        """Where the stages begin: they are put together by measured time, so another run of the
        same plan may cut elsewhere."""
        return [part.start for part in self.stage_parts]

    @property
    def training(self) -> dict[str, Any]:
        """What makes it the same training, whatever it is spread over. A function of a notebook has
        another file every time."""
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
        ranks = tuple(
            RankPlan(
                **{
                    **rank,
                    "devices": tuple(Device(**d) for d in rank["devices"]),
                    "split": tuple(rank["split"]),
                }
            )
            for rank in data["ranks"]
        )
        stages = tuple(
            Stage(**{**stage, "modules": tuple(stage["modules"])}) for stage in data["stage_parts"]
        )
        return cls(
            **{
                **data,
                "ranks": ranks,
                "stage_parts": stages,
                "reasons": tuple(Reason(**reason) for reason in data["reasons"]),
                "remarks": tuple(data["remarks"]),
                "differences": tuple(data["differences"]),
                "shard_units": tuple(data.get("shard_units", ())),
                "control": tuple(data.get("control", ())),
            }
        )
