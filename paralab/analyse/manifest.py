"""Read run and experiment manifests: what the command was asked to do."""

from pathlib import Path
from typing import TypeVar

from paralab.machine.host import Machine
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.record.types import Record, convert, read_manifest
from paralab.workload.summary import Summary

M = TypeVar("M", bound="Manifest")


class Manifest(Record, frozen=True, kw_only=True):
    schema: int
    created: str
    command: list[str]
    packages: dict[str, str | None]
    machine: Machine
    workload: Summary


class RunManifest(Manifest, frozen=True, kw_only=True):
    plan: Plan


class About(Record, frozen=True, kw_only=True):
    """The practical and the parts that an experiment measures, if any."""

    practical: str | None = None  # 5, 6, 7, 10, handbook
    parts: tuple[int, ...] = ()
    variant: str = ""  # the student whose seed and batch size were used


class LeftOut(Record, frozen=True, kw_only=True):
    """A configuration that this machine or model cannot run."""

    name: str
    reason: str


class Planned(Record, frozen=True, kw_only=True):
    """A planned configuration. `runs` lists its run folders, one per round."""

    name: str
    command: str
    request: Request
    runs: list[str]


class ExperimentManifest(Manifest, frozen=True, kw_only=True):
    kind: str  # compare, scale, practical
    configurations: list[Planned]
    about: About = About()
    left_out: tuple[LeftOut, ...] = ()
    baseline: str | None = None  # None for `single` or, without it, the first one


class Pruned(Record, frozen=True, kw_only=True):
    """A configuration that `tune` did not measure, because it does not fit a device's memory."""

    name: str
    command: str
    needed_bytes: int  # estimated


class SearchNotes(Record, frozen=True, kw_only=True):
    """What `tune` did not measure, and why."""

    considered: int = 0
    untried: int = 0  # because --trials limits the search
    pruned: tuple[Pruned, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    not_estimated: tuple[LeftOut, ...] = ()  # their memory is unknown


class TuneManifest(Manifest, frozen=True, kw_only=True):
    devices: int | None = None  # how many every layout uses; None if only options were searched
    device_bytes: int | None = None  # the memory limit, if there is one
    any_batch: bool = False  # whether configurations may have different batch sizes


def kind_of(folder: Path) -> str:
    """Return `run`, `compare`, `scale`, `tune`, `verify`, `practical`, or `slurm`."""
    return str(read_manifest(folder).get("kind", "run"))


def about_of(folder: Path) -> About:
    return convert(read_manifest(folder).get("about") or {}, About, folder / "manifest.json")


def manifest_of(folder: Path, kind: type[M]) -> M:
    return convert(read_manifest(folder), kind, folder / "manifest.json")
