"""This process as a rank that is observed: its events, what it is doing now, and its own end if
anything of ours goes wrong.

Events wait in memory until it is known which rank this process is: from the environment of a
launcher, from init_process_group, or, in a program without either, from its first backward pass. A
process of which none of these is seen (the parent of spawned ranks, a worker of a DataLoader, a
tool) leaves no trace. An error in here switches the observation off and is written down; the user's
program never sees it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
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
from paralab.record.mmap_log import MmapLog
from paralab.record.open_operations import OpenOperations
from paralab.record.ring_log import RingLog

MAY_WAIT = {
    "init",
    "destroy",
    "group",
    "wrap",
    "forward",
    "backward",
    "collective",
    "pipeline",
    "save",
    "load",
    "held",
}
MINOR = {
    "loss",
    "zero_grad",
    "amp",
    "autocast",
    "clip",
    "scheduler",
    "seed",
}  # left out of light steps
MOST_WAITING = 10_000  # events before it is known which rank this is


def _encoder() -> Callable[[Any], str]:
    """JSON, with one encoder for all events: the standard library makes a new one for each, which
    costs more than the encoding."""
    slow = json.JSONEncoder(separators=(",", ":"), default=str)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    try:
        encode = make(
            None, str, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True
        )
        assert "".join(encode({"a": [1, None]}, 0)) == '{"a":[1,null]}'
    except Exception:  # a Python that makes its encoders in another way
        return slow.encode
    return lambda value: "".join(encode(value, 0))


_encode = _encoder()


class Rank:
    def __init__(self, folder: str, trial_steps: int | None) -> None:
        self.folder = Path(folder)
        self.trial_steps = trial_steps
        self.when_known: Callable[[], None] = lambda: None
        self.parents: Any = None
        self.fresh()

    def fresh(self) -> None:
        """At the beginning, and in a child that was forked: that one may become a rank of its
        own."""
        self.on = True
        self.pid = os.getpid()
        self.rank: int | None = None
        self.budget = Budget()
        self.watched = True  # everything of this step is written down; else it is a light one (see observe.light)
        self.calls: dict[tuple[Any, ...], int] = {}  # of light steps
        sites.forget()
        self.steps = 0  # optimizer steps that are over, of the optimizer that made most
        self.passes = self.usual = (
            0  # light backwards since the last step, and before it: a scaler may leave steps out
        )
        self.waiting: list[dict[str, Any]] = []
        self.journal: MmapLog | None = None
        self.recent: RingLog | None = None
        self.slot: OpenOperations | None = None
        self.doing: list[dict[str, Any]] = []  # open operations of the main thread, outermost first
        self.overwritten: Any = None  # the node in autograd's graph of the last tensor that a collective has overwritten
        self.main = threading.main_thread().ident
        self.path: Path | None = None

    # --- writing
    # -----------------------------------------------------------------------------------------------------------------

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event down. The site, unless given, is the user's innermost frames."""
        if not self.on:
            return
        if "site" not in fields:
            fields["site"] = self.site()
        self.write(
            {
                "event": event,
                "t": fields.pop("t", None) or time.time(),
                "step": self.steps,
                **fields,
            }
        )

    def site(self, where: sites.Where | None = None) -> int | None:
        number, event = sites.number_of(sites.where() if where is None else where)
        if event:
            self.write(event)
        return number

    def write(self, event: dict[str, Any]) -> None:
        if self.journal is None:
            if len(self.waiting) < MOST_WAITING:
                self.waiting.append(event)
            return
        try:
            self.journal.append(_encode(event).encode())
        except OSError:
            self.on = False  # the disk is full: there is no place to say so

    # --- steps
    # -------------------------------------------------------------------------------------------------------------------

    def step_is_over(self, steps: int) -> None:
        """`steps`: that are over now."""
        if steps == self.steps:
            return  # of another optimizer
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
        """In a light step. Where no step follows for long (all are left out?), everything is
        written down again."""
        self.passes += 1
        if self.passes > max(EVERY, 2 * self.usual):
            self.watched = True

    def samples(self, count: int) -> bool:
        """Tensors are looked at in this step: at first by the `count` of what looks at them, then
        by the steps."""
        return is_sampled(count if self.steps < EVERY else self.steps + 1)

    # --- operations that may not come back
    # ---------------------------------------------------------------------------------------

    def open(self, event: str, fields: dict[str, Any]) -> dict[str, Any]:
        """An operation begins. What is open stays readable from outside, whatever happens to this
        process."""
        operation = {
            "event": event,
            "t": time.time(),
            "step": self.steps,
            "site": self.site(),
            **fields,
        }
        if threading.get_ident() == self.main:
            self.doing.append(operation)
            if event in MAY_WAIT:
                self._say()
        return operation

    def close(self, operation: dict[str, Any], **more: Any) -> None:
        doing = self.doing
        if operation in doing:
            del doing[doing.index(operation) :]
            if operation["event"] in MAY_WAIT:
                self._say()
        operation.update(more)
        operation["seconds"] = round(time.time() - operation["t"], 6)
        self.write(operation)

    def _say(self) -> None:
        if self.slot is None:
            return
        if not self.doing:
            self.slot.write(b"[]")
        else:
            waiting = [
                operation
                for operation in self.doing
                if operation["event"] in MAY_WAIT and "t" in operation
            ]
            self.slot.write(
                _encode([_brief(operation) for operation in waiting[-3:]]).encode()
                if waiting
                else b"[]"
            )

    # --- who this is
    # -------------------------------------------------------------------------------------------------------------

    def identify(self, rank: int | None = None, world: int | None = None) -> None:
        """From here on this process is known to be this rank."""
        if self.rank is not None or not self.on:
            return
        environment = os.environ
        self.rank = int(environment.get("RANK", 0)) if rank is None else rank
        if self._is_taken():
            self.on = False
            return
        world = int(environment.get("WORLD_SIZE", 1)) if world is None else world
        stem, self.journal = self._opened()
        self.path = self.folder / f"{stem}.jsonl"
        self.slot = OpenOperations(self.folder / f"{stem}.now")
        self.recent = RingLog(self.folder / f"{stem}.recent")
        waiting, self.waiting = self.waiting, []
        for event in (self._start(world), *waiting):
            self.write(event)
        self._say()
        self.when_known()

    def _is_taken(self) -> bool:
        """The rank of this number lives: this process is a tool that it has started, which has
        inherited its environment."""
        for path in self.folder.glob(f"rank{self.rank}.*jsonl"):
            with suppress(OSError, ValueError):
                with path.open() as file:
                    start = json.loads(file.readline())
                if (
                    start["host"] == socket.gethostname()
                    and start["pid"] != self.pid
                    and _lives(start["pid"])
                ):
                    return True
        return False

    def _opened(self) -> tuple[str, MmapLog]:
        """rank0.jsonl; rank0.1.jsonl for a process that takes its place after a restart."""
        for attempt in range(1000):
            stem = f"rank{self.rank}" if attempt == 0 else f"rank{self.rank}.{attempt}"
            with suppress(FileExistsError):
                return stem, MmapLog(self.folder / f"{stem}.jsonl")
        raise FileExistsError(f"{self.folder} holds 1,000 files of rank {self.rank}")

    def _start(self, world: int) -> dict[str, Any]:
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
            "argv": sys.argv,
            "cwd": os.getcwd(),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "cores": cores,
            "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "trial_steps": self.trial_steps,
        }

    def switch_off(self, error: BaseException) -> None:
        """Something of ours went wrong: say so, and leave the user's program alone from here on."""
        if not self.on:
            return
        with suppress(Exception):
            self.emit("off", error=f"{type(error).__name__}: {error}", site=None)
            self.doing.clear()
            self._say()
        self.on = False
        with suppress(OSError):
            (self.folder / f"off-{self.pid}.txt").write_text(f"{type(error).__name__}: {error}\n")

    def flush(self) -> None:
        """At the end: nothing more is written."""
        if self.journal is not None:
            journal, self.journal = self.journal, None
            self.on = False
            with suppress(Exception):
                journal.close()


def _brief(operation: dict[str, Any]) -> dict[str, Any]:
    """Without the lists of names and numbers of a whole model."""
    return {
        name: value
        for name, value in operation.items()
        if not (isinstance(value, list) and len(value) > 8)
    }


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Guarded:
    """A callback of ours, as torch may call it: it never raises, and in light steps it is not
    called unless asked for."""

    def __init__(self, rank: Rank, note: Callable[..., Any], in_light_steps: bool) -> None:
        self.rank, self.note, self.in_light_steps = rank, note, in_light_steps

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # nothing of ours goes into what is compiled
        rank = self.rank
        if rank.on and (rank.watched or self.in_light_steps):
            began = time.perf_counter_ns()
            try:
                self.note(*args)
            except Exception as error:
                rank.switch_off(error)
            rank.budget.spent += time.perf_counter_ns() - began

    def __reduce__(self) -> tuple[Any, ...]:
        """Saved with the module that it hangs on: as `{}.get`, which gives back the arguments it is
        given, and needs no paralab."""
        return getattr, ({}, "get")

    def __deepcopy__(self, memo: Any) -> Guarded:
        return self
