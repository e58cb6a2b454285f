"""List the runs and experiments under a folder, newest first, without reading their events.

A finished run's numbers come from its result.json, and a running one's from the last lines of its
event files. A folder that cannot be read becomes a row with the reason. Rows of finished runs are
cached, so listing 200 runs again takes milliseconds.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from paralab.analyse.manifest import ExperimentManifest, RunManifest
from paralab.analyse.recording import median
from paralab.analyse.result import Spread
from paralab.errors import ParalabError
from paralab.plan.plan import label
from paralab.record.events import End, Start, Step
from paralab.record.reader import parse
from paralab.record.types import JsonObject, Record, convert, read_manifest, read_object
from paralab.serve.problem import EXPECTED, explain
from paralab.serve.safe_path import NotServed, require_inside
from paralab.serve.status import IS_OVER, SILENT_SECONDS, Status, is_running, status_of
from paralab.units import plural

MOST_LEVELS = 4  # a class has runs at class/student/run
MOST_FOLDERS = 5000  # visit at most this many folders, even with `paralab serve /`
# Read this much of an event file, for its start event and its last steps.
FIRST_BYTES, LAST_BYTES = 4096, 65536
Stamp = tuple[tuple[str, int], ...]


class Row(Record, frozen=True, kw_only=True):
    """One run or experiment. Unknown numbers are None."""

    name: str  # the path under the served folder
    kind: str  # run, compare, scale, tune, verify, practical, slurm, or unknown
    status: Status
    configuration: str = ""
    workload: str = ""
    created: float = 0.0  # Unix time
    step_seconds: float | None = None
    loss: float | None = None
    step: int | None = None
    num_steps: int | None = None
    silent_seconds: float | None = None  # how long ago the last event was, if the run is not over
    reason: str = ""  # why the folder cannot be read


class Listing:
    """The rows of the served folder, or of one experiment. Rows of finished runs are cached, and
    viewers who wait at the same time share one read."""

    def __init__(self, root: Path, experiment: Path | None = None) -> None:
        self.root, self.experiment = root, experiment
        self._known: dict[Path, tuple[Stamp, Row]] = {}
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._begun = self._finished = 0  # how many reads have begun, and have finished

    def read(self) -> list[Row]:
        """Return the rows of a read that began after this call."""
        wanted = self._begun + 1
        with self._lock:
            if self._finished < wanted:
                self._begun += 1
                self._rows = self._read()
                self._finished = self._begun
            return self._rows

    def _read(self) -> list[Row]:
        folders = find_runs(self.experiment or self.root, inside=self.experiment is not None)
        rows = [self._row(folder) for folder in folders]
        for place, row in enumerate(rows):
            # The runs of an experiment are planned together, and start one after another.
            if self.experiment and row.status == "starting":
                rows[place] = replace(row, status="not started")
        return sorted(rows, key=lambda row: (-row.created, row.name))

    def _row(self, folder: Path) -> Row:
        names = ("", "manifest.json", "outcome.json", "result.json")
        stamp = stamp_of(folder / name for name in names)
        known = self._known.get(folder)
        if known and known[0] == stamp:
            return known[1]
        row = read_row(self.root, folder)
        if row.status in IS_OVER:
            self._known[folder] = (stamp, row)
        return row


def stamp_of(paths: Iterable[Path]) -> Stamp:
    """Return a value that changes when a file or folder appears, changes, or disappears."""
    stamp = []
    for path in paths:
        with suppress(OSError):
            stamp.append((os.fspath(path), path.stat().st_mtime_ns))
    return tuple(stamp)


def find_runs(root: Path, inside: bool = False) -> Iterator[Path]:
    """Yield run and experiment folders. If the root is an experiment (`inside`), yield its runs."""
    folders = [(root, 0)]
    num_visited = 0
    while folders and num_visited < MOST_FOLDERS:
        folder, level = folders.pop()
        num_visited += 1
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        names = {entry.name for entry in entries}
        is_run = bool(names & {"manifest.json", "manifest.part", "events"})
        if is_run and not (inside and level == 0):
            yield folder
        elif level < MOST_LEVELS:
            folders += [
                (folder / entry.name, level + 1)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            ]


def read_row(root: Path, folder: Path) -> Row:
    """Read one folder. A problem becomes the row's reason."""
    path, created = folder.relative_to(root).as_posix(), _seconds_of(folder)
    name = os.fsencode(path).decode(errors="backslashreplace")
    row = Row(name=name, kind="unknown", status="damaged", created=created)
    try:
        if name != path:
            raise NotServed("The folder's name is not valid UTF-8.", fix="rename the folder")
        require_inside(root, folder)
        manifest = read_manifest(folder)
        kind = str(manifest.get("kind", "run"))
        with suppress(ValueError):
            created = datetime.fromisoformat(str(manifest.get("created"))).timestamp()
            row = replace(row, created=created)
        read = _run if kind == "run" else _other
        return read(folder, manifest, replace(row, kind=kind))
    except EXPECTED as error:
        reason = error.problem if isinstance(error, ParalabError) else explain(error)
        if not isinstance(error, NotServed) and not (folder / "manifest.json").exists():
            reason = "it has no manifest.json: the run is about to start, or it was killed"
        return replace(row, reason=reason)


def _run(folder: Path, manifest: JsonObject, row: Row) -> Row:
    read = convert(manifest, RunManifest, folder / "manifest.json")
    plan, workload = read.plan, read.workload.name
    row = replace(row, configuration=label(plan), workload=workload, num_steps=plan.num_steps)
    if result := _result(folder):
        losses = [loss for loss in result.losses if loss is not None]
        return replace(
            row,
            status=result.status,
            step_seconds=result.step_seconds.median if result.step_seconds else None,
            loss=losses[-1] if losses else None,
            step=result.reached_step,
        )

    starts, ends, steps = _read_ends(folder, plan.world_size)
    silent = max(0.0, time.time() - last_written(folder))
    running = [is_running(start) for start in starts]
    status = status_of(running, ends, plan.world_size, silent, has_result=False)
    last = min((max(own, default=-1) for own in steps), default=-1)
    known = [own[last] for own in steps if last in own]
    return replace(
        row,
        status=status,
        step_seconds=median([step.seconds for own in steps for step in own.values()]),
        loss=sum(step.loss for step in known) if len(known) == plan.world_size else None,
        step=last + 1,
        silent_seconds=None if status in IS_OVER else silent,
    )


class _Result(msgspec.Struct):
    """The fields of result.json that a row shows."""

    status: Status
    reached_step: int
    losses: list[float | None]
    step_seconds: Spread | None = None


def _result(folder: Path) -> _Result | None:
    try:
        value = read_object(folder / "result.json")
        return convert(value, _Result, folder / "result.json")
    except ParalabError:
        return None


def _read_ends(
    folder: Path, world_size: int
) -> tuple[list[Start], list[End], list[dict[int, Step]]]:
    """Read the first and the last lines of each rank's newest event file."""
    files = _event_files(folder)
    starts: list[Start] = []
    ends: list[End] = []
    steps: list[dict[int, Step]] = []
    for rank in range(world_size):
        # rank0.jsonl is the first attempt, and rank0.10.jsonl is longer than rank0.2.jsonl.
        own = [path for path in files if path.name.startswith(f"rank{rank}.")]
        newest = max(own, key=lambda path: (len(path.name), path.name), default=None)
        events = [event for line in _lines(newest) if (event := parse(line))] if newest else []
        starts += [event for event in events if isinstance(event, Start)]
        ends += [event for event in events if isinstance(event, End)]
        steps.append({event.step: event for event in events if isinstance(event, Step)})
    return starts, ends, steps


def _event_files(folder: Path) -> list[Path]:
    """List the event files. Do not use glob, which treats a folder without read permission as
    empty."""
    events = folder / "events"
    files = events.iterdir() if events.is_dir() else ()
    return [path for path in files if path.name.startswith("rank") and path.suffix == ".jsonl"]


def _lines(path: Path) -> list[bytes]:
    """Return the complete lines at the start and at the end of a file."""
    with path.open("rb") as file:
        first = file.read(FIRST_BYTES)
        size = file.seek(0, os.SEEK_END)
        rest = max(len(first), size - LAST_BYTES)
        file.seek(rest)
        last = file.read()
    if rest == len(first):  # the whole file
        return (first + last).split(b"\n")[:-1]
    return first.split(b"\n")[:-1] + last.split(b"\n")[1:-1]


def last_written(folder: Path) -> float:
    """Return when a rank wrote its last event, or else when the manifest was written."""
    times = [_seconds_of(folder / "manifest.json")]
    with suppress(OSError):
        times += [entry.stat().st_mtime for entry in os.scandir(folder / "events")]
    return max(times)


def _seconds_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _other(folder: Path, manifest: JsonObject, row: Row) -> Row:
    """Read an experiment: a comparison, a search, a verification, a practical, or a Slurm job."""
    workload = manifest.get("workload")
    name = str(workload.get("name", "")) if isinstance(workload, dict) else ""
    row = replace(row, workload=name, configuration=_describe(folder, manifest))
    if (folder / "outcome.json").exists() or (folder / "result.json").exists():
        return replace(row, status="completed")
    runs = [path.parent for path in folder.glob("**/manifest.json") if path.parent != folder]
    newest = max(runs, key=last_written, default=folder)
    silent = max(0.0, time.time() - last_written(newest))
    ranks = {path.name.split(".")[0] for path in _event_files(newest)}
    starts = [] if newest == folder else _read_ends(newest, len(ranks))[0]
    running = [is_running(start) for start in starts]
    status = status_of(running, [], len(starts) + 1, silent, has_result=False)
    if status == "killed" and silent < SILENT_SECONDS:  # an experiment pauses between two runs
        status = "running"
    return replace(row, status=status, silent_seconds=silent)


def _describe(folder: Path, manifest: JsonObject) -> str:
    """Return the practical, or the number of configurations. Other kinds have neither."""
    try:
        read = convert(manifest, ExperimentManifest, folder / "manifest.json")
    except ParalabError:
        return ""
    if read.about.practical:
        student = f", {read.about.variant}" if read.about.variant else ""
        return f"practical {read.about.practical}{student}"
    return plural(len(read.configurations), "configuration")
