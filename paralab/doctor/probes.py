"""Tests that need other processes: what torch can do, and whether two ranks can connect. Each has
a deadline."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paralab.machine.child import command
from paralab.machine.host import loopback
from paralab.record.reader import parse_object
from paralab.units import seconds, size

BYTES = 25 * 2**20  # the size of a DDP bucket
SECONDS = 20.0  # deadline of one test: import torch, connect, run a few all-reduces


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    processors: int | None = None  # streaming multiprocessors


@dataclass(frozen=True)
class Torch:
    """The installed torch. `threads` is the number of compute threads per process in this
    environment."""

    version: str
    cuda: str | None
    backends: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    threads: int

    def __str__(self) -> str:
        return f"{self.version}, {', '.join(self.backends) or 'no backend'}"


@dataclass(frozen=True)
class Link:
    """An all-reduce between two ranks. `copy_seconds` is the time to copy the same number of bytes
    in memory. `problem` says why no time was measured."""

    backend: str
    ranks: tuple[str, str]
    bytes: int
    seconds: float | None
    copy_seconds: float | None
    problem: str | None = None

    @property
    def bytes_per_second(self) -> float | None:
        return self.bytes / self.seconds if self.seconds else None

    def __str__(self) -> str:
        between = f"{size(self.bytes)} between {' and '.join(self.ranks)} over {self.backend}"
        if self.seconds is None:
            return f"{between}: {self.problem}"
        copied = seconds(self.copy_seconds) if self.copy_seconds else ""
        beside = copied and f"; a copy in memory takes {copied}"
        return f"{between}: {seconds(self.seconds)}, {size(self.bytes_per_second)}/s{beside}"


@dataclass(frozen=True)
class Pair:
    """An all-reduce between two GPUs over NCCL, repeated through CPU memory if it fails."""

    direct: Link
    through_host: Link | None


def two_ranks(
    backend: str,
    devices: tuple[int | None, int | None] = (None, None),
    environment: dict[str, str] | None = None,
) -> tuple[Torch | None, Link]:
    """Time an all-reduce of one bucket between two processes, then stop them. They rendezvous
    through a file, so they do not need a port."""
    names = (
        ("rank 0", "rank 1") if devices[0] is None else (f"cuda:{devices[0]}", f"cuda:{devices[1]}")
    )
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        ends, lines, errors = _run(Path(folder), backend, devices, environment or {})
    printed = {key: value for line in lines for key, value in parse_object(line).items()}
    torch = _torch(printed["torch"]) if "torch" in printed else None
    if link := printed.get("link"):
        return torch, Link(backend, names, link["bytes"], link["seconds"], link["copy_seconds"])
    return torch, Link(backend, names, BYTES, None, None, _problem(ends, errors))


def _run(
    folder: Path, backend: str, devices: Sequence[int | None], environment: dict[str, str]
) -> tuple[list[int | None], list[bytes], list[str]]:
    """Return the exit codes (None after the deadline), what rank 0 printed, and each stderr."""
    # DETAIL may crash torch (H19).
    quiet = {"TORCH_DISTRIBUTED_DEBUG": "OFF", "PYTHONUNBUFFERED": "1"}
    near = {"GLOO_SOCKET_IFNAME": name} if (name := loopback()) and backend == "gloo" else {}
    children = []
    try:
        for rank, device in enumerate(devices):
            test = {"backend": backend, "device": device, "bytes": BYTES, "seconds": SECONDS}
            question = json.dumps({"rank": rank, "store": str(folder / "store"), **test})
            with open(folder / f"out{rank}", "wb") as out, open(folder / f"err{rank}", "wb") as err:
                child = subprocess.Popen(
                    command("paralab.observe.link", question),
                    env={**os.environ, **quiet, **near, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
                children.append(child)
        until = time.monotonic() + SECONDS
        ends: list[int | None] = []
        for child in children:
            try:
                ends.append(child.wait(max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                ends.append(None)
    finally:
        for child in children:
            child.kill()
            child.wait()
    errors = [(folder / f"err{rank}").read_text(errors="replace") for rank in (0, 1)]
    return ends, (folder / "out0").read_bytes().splitlines(), errors


def _problem(ends: list[int | None], errors: list[str]) -> str:
    for text, end in zip(errors, ends, strict=True):
        if end and text.strip():
            return text.strip().splitlines()[-1][:200]
    if None in ends:
        return f"no response within {SECONDS:.0f} s"
    return f"the ranks ended with codes {ends}"


def _torch(printed: dict[str, Any]) -> Torch:
    gpus = tuple(Gpu(**gpu) for gpu in printed["gpus"])
    return Torch(**{**printed, "backends": tuple(printed["backends"]), "gpus": gpus})


def gpu_pairs(gpus: int) -> tuple[Pair, ...]:
    """Test neighbors in a ring of GPUs. Disjoint pairs run at the same time: 0-1 and 2-3, then 1-2
    and 3-0."""
    ring = [(first, first + 1) for first in range(gpus - 1)] + ([(gpus - 1, 0)] if gpus > 2 else [])
    rounds = [ring[::2], ring[1::2]] if gpus % 2 == 0 else [ring[:-1:2], ring[1:-1:2], ring[-1:]]
    with ThreadPoolExecutor(max_workers=max(1, gpus // 2)) as pool:
        return tuple(pair for disjoint in rounds for pair in pool.map(_pair, disjoint))


def _pair(devices: tuple[int, int]) -> Pair:
    direct = two_ranks("nccl", devices)[1]
    through_host = {"NCCL_P2P_DISABLE": "1"}
    return Pair(direct, two_ranks("nccl", devices, through_host)[1] if direct.problem else None)


def driver_gpus() -> tuple[Gpu, ...] | None:
    question = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.check_output(
            question, text=True, timeout=5, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    cells = [line.rpartition(",") for line in text.splitlines() if "," in line]
    return tuple(
        Gpu(name.strip(), int(memory) * 2**20)
        for name, _, memory in cells
        if memory.strip().isdigit()
    )
