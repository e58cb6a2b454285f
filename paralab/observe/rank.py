"""This process as a watched rank: its events and its open operations.

Events stay in memory until this process has a rank: from the launcher's environment, from
init_process_group, or else at its first backward pass. A process with none of these (the parent of
spawned ranks, a DataLoader worker, a tool) does not write anything. If our code fails, it records
the error and stops watching; the user's program never sees it.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paralab.observe import sites
from paralab.observe.budget import Budget
from paralab.observe.digests import EVERY, is_sampled
from paralab.observe.mmap_log import MmapLog
from paralab.record.operations import OpenOperations, RingLog

Fields = dict[str, Any]  # an event's fields, ready for JSON
MAY_WAIT = set(
    "init destroy group wrap forward backward collective pipeline save load held".split()
)
# Events that light steps omit.
MINOR = {"loss", "zero_grad", "amp", "autocast", "clip", "scheduler", "seed"}
MOST_WAITING = 10_000  # events kept in memory until the rank is known


_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class Rank:
    def __init__(self, folder: str, trial_steps: int | None) -> None:
        self.folder = Path(folder)
        self.trial_steps = trial_steps
        self.when_known: Callable[[], None] = lambda: None
        self.parents: Any = None
        self.fresh()

    def fresh(self) -> None:
        """Start over: in a new process, and in a forked child, which may become another rank."""
        self.on = True
        self.pid = os.getpid()
        self.rank: int | None = None
        self.budget = Budget()
        self.watched = True  # record everything in this step; otherwise it is a light step
        self.calls: dict[tuple[Any, ...], int] = {}  # numbers of the calls in light steps
        sites.forget()
        self.steps = 0  # finished steps of the optimizer with the most steps
        # Light backward passes since the last step, and between the two steps before that.
        self.passes = self.usual = 0
        self.waiting: list[Fields] = []
        self.journal: MmapLog | None = None
        self.recent: RingLog | None = None
        self.slot: OpenOperations | None = None
        self.doing: list[Fields] = []  # open operations of the main thread, outermost first
        self.overwritten: Any = None  # autograd node of the last tensor that a collective overwrote
        self.main = threading.main_thread().ident
        self.path: Path | None = None

    # --- writing

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event. By default, the site is the user's innermost frames."""
        if not self.on:
            return
        if "site" not in fields:
            fields["site"] = self.site()
        t = fields.pop("t", None) or time.time()
        self.write({"event": event, "t": t, "step": self.steps, **fields})

    def site(self, where: sites.Where | None = None) -> int | None:
        number, event = sites.number_of(sites.where() if where is None else where)
        if event:
            self.write(event)
        return number

    def write(self, event: Fields) -> None:
        if self.journal is None:
            if len(self.waiting) < MOST_WAITING:
                self.waiting.append(event)
            return
        try:
            self.journal.append(_encode(event).encode())
        except OSError:
            self.on = False  # the disk is full, so we cannot report it either

    # --- steps

    def step_is_over(self, steps: int) -> None:
        """Record that an optimizer finished a step. `steps` is the highest count so far."""
        if steps == self.steps:
            return  # another optimizer has finished more steps
        self.steps = steps
        self.usual, self.passes = self.passes, 0
        if steps < self.budget.until:
            return
        self.overwritten = None
        is_known = self.budget.step_is_over(steps)
        self.watched = self.budget.watched
        if is_known:
            self.emit("cost", share=round(self.budget.share, 5), every=self.budget.every, site=None)

    def pass_is_made(self) -> None:
        """Count a backward pass in a light step. If no step follows for many passes (a scaler may
        skip them all), record everything again."""
        self.passes += 1
        if self.passes > max(EVERY, 2 * self.usual):
            self.watched = True

    def samples(self, count: int) -> bool:
        """Return whether to read tensors now. Early steps depend on `count`, later ones on their
        number."""
        return is_sampled(count if self.steps < EVERY else self.steps + 1)

    # --- operations that may never return

    def open(self, event: str, fields: Fields) -> Fields:
        """Record that an operation begins. Other processes can read it even if this one dies."""
        operation = {"event": event, "t": time.time(), "step": self.steps, "site": self.site()}
        operation.update(fields)
        if threading.get_ident() == self.main:
            self.doing.append(operation)
            if event in MAY_WAIT:
                self._publish_open()
        return operation

    def close(self, operation: Fields, **more: Any) -> None:
        doing = self.doing
        if operation in doing:
            del doing[doing.index(operation) :]
            if operation["event"] in MAY_WAIT:
                self._publish_open()
        operation.update(more)
        operation["seconds"] = round(time.time() - operation["t"], 6)
        self.write(operation)

    def _publish_open(self) -> None:
        if self.slot is None:
            return
        waiting = [each for each in self.doing if each["event"] in MAY_WAIT and "t" in each]
        brief = [_brief(operation) for operation in waiting[-3:]]
        self.slot.write(_encode(brief).encode() if brief else b"[]")

    # --- identity

    def identify(self, rank: int | None = None, world: int | None = None) -> None:
        """Record which rank this process is, and start writing."""
        if self.rank is not None or not self.on:
            return
        environment = os.environ
        self.rank = int(environment.get("RANK", 0)) if rank is None else rank
        if self._is_taken():
            self.on = False
            return
        world = int(environment.get("WORLD_SIZE", 1)) if world is None else world
        stem, self.journal = self._open_files()
        self.path = self.folder / f"{stem}.jsonl"
        self.slot = OpenOperations(self.folder / f"{stem}.now")
        self.recent = RingLog(self.folder / f"{stem}.recent")
        waiting, self.waiting = self.waiting, []
        for event in (self._start(world), *waiting):
            self.write(event)
        self._publish_open()
        self.when_known()

    def _is_taken(self) -> bool:
        """Return whether another live process is already this rank. If so, this one is a tool that
        inherited its environment."""
        for path in self.folder.glob(f"rank{self.rank}.*jsonl"):
            with suppress(OSError, ValueError):
                with path.open() as file:
                    start = json.loads(file.readline())
                is_other = start["host"] == socket.gethostname() and start["pid"] != self.pid
                if is_other and _lives(start["pid"]):
                    return True
        return False

    def _open_files(self) -> tuple[str, MmapLog]:
        """Open rank0.jsonl, or rank0.1.jsonl after a restart."""
        for attempt in range(1000):
            stem = f"rank{self.rank}" if attempt == 0 else f"rank{self.rank}.{attempt}"
            with suppress(FileExistsError):
                return stem, MmapLog(self.folder / f"{stem}.jsonl")
        raise FileExistsError(f"{self.folder} already contains 1,000 files for rank {self.rank}")

    def _start(self, world: int) -> Fields:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return {
            "event": "start",
            "t": time.time(),
            "step": 0,
            "rank": self.rank,
            "world": world,
            "local_rank": int(os.environ.get("LOCAL_RANK", self.rank or 0)),
            "pid": self.pid,
            "host": socket.gethostname(),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "cores": cores,
            "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        }

    def switch_off(self, error: BaseException) -> None:
        """Record an error in our code, and stop watching."""
        if not self.on:
            return
        with suppress(Exception):
            self.emit("off", error=f"{type(error).__name__}: {error}", site=None)
            self.doing.clear()
            self._publish_open()
        self.on = False
        with suppress(OSError):
            (self.folder / f"off-{self.pid}.txt").write_text(f"{type(error).__name__}: {error}\n")

    def flush(self) -> None:
        if self.journal is not None:
            journal, self.journal = self.journal, None
            self.on = False
            with suppress(Exception):
                journal.close()


def _brief(operation: Fields) -> Fields:
    """Omit long lists, such as all parameter names of a model."""
    return {k: v for k, v in operation.items() if not (isinstance(v, list) and len(v) > 8)}


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's process
    return True


class Guarded:
    """A callback for torch that never raises. It skips light steps unless `in_light_steps`."""

    def __init__(self, rank: Rank, note: Callable[..., Any], in_light_steps: bool) -> None:
        self.rank, self.note, self.in_light_steps = rank, note, in_light_steps

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # keep our code out of compiled graphs
        rank = self.rank
        if rank.on and (rank.watched or self.in_light_steps):
            began = time.perf_counter_ns()
            try:
                self.note(*args)
            except Exception as error:
                rank.switch_off(error)
            rank.budget.spent += time.perf_counter_ns() - began

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as `{}.get`, so that a saved module can be loaded without paralab."""
        return getattr, ({}, "get")

    def __deepcopy__(self, memo: Any) -> "Guarded":
        return self
