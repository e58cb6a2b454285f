"""`Plan`: a request resolved against a machine and a workload, frozen and complete, with a reason per choice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paralab.plan.grid import Device
from paralab.units import plural


@dataclass(frozen=True)
class Reason:
    """One choice that was made, and why."""

    choice: str
    value: str
    because: str


@dataclass(frozen=True)
class RankPlan:
    """What one process does: its devices, and how many samples of a full batch each of them trains on."""

    rank: int
    local_rank: int
    devices: tuple[Device, ...]
    samples_per_step: int
    split: tuple[int, ...]
    node: str = ""  # the host's name, where something else than paralab has launched the ranks


@dataclass(frozen=True)
class Stage:
    """A contiguous part of the model: it begins when `start` is called and owns the parameters of `modules`."""

    start: str
    modules: tuple[str, ...]
    layers: int
    seconds: float
    parameter_bytes: int


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

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def num_devices(self) -> int:
        return len({device.name for rank in self.ranks for device in rank.devices})

    def title(self) -> str:
        """`ddp · 2 replicas`, for tables and folder names."""
        parts = [self.strategy]
        if self.strategy in ("dp", "ddp", "hybrid"):
            parts.append(plural(self.replicas, "replica"))
        if self.strategy in ("mp", "pipeline", "hybrid"):
            parts.append(plural(self.stages, "stage"))
        return " · ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        ranks = tuple(
            RankPlan(**{**rank, "devices": tuple(Device(**d) for d in rank["devices"]), "split": tuple(rank["split"])})
            for rank in data["ranks"]
        )
        stages = tuple(Stage(**{**stage, "modules": tuple(stage["modules"])}) for stage in data["stage_parts"])
        return cls(
            **{
                **data,
                "ranks": ranks,
                "stage_parts": stages,
                "reasons": tuple(Reason(**reason) for reason in data["reasons"]),
                "remarks": tuple(data["remarks"]),
                "differences": tuple(data["differences"]),
            }
        )
