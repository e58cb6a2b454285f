"""Read a job's environment without torch: launcher, allocation, port, names, memory, disks. Each
function takes its source (environment variables, a system folder) as an argument, so that tests
can supply one.
"""

import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_PORT = 29500
ANSWER_SECONDS = 3.0  # how long to wait for a name server or a connection


@dataclass(frozen=True)
class Launch:
    """What the environment says about the job: its launcher, and how many ranks it has in total and
    on this machine."""

    variables: Mapping[str, str]
    by: str | None = None
    ranks: int | None = None
    local_ranks: int | None = None
    nodes: int | None = None

    @property
    def rank(self) -> int | None:
        return _number(self.variables, "RANK")

    def __str__(self) -> str:
        variables = " ".join(f"{name}={value}" for name, value in self.variables.items())
        return " ".join(filter(None, (self.by, variables and f"({variables})")))


def launch_of(environment: Mapping[str, str]) -> Launch:
    """Read the variables of torchrun or Slurm (inside srun, those of the job step)."""
    known = {name: environment[name] for name in LAUNCHER if name in environment}
    ranks, local = _number(environment, "WORLD_SIZE"), _number(environment, "LOCAL_WORLD_SIZE")
    nodes = None
    by = "RANK and WORLD_SIZE" if {"RANK", "WORLD_SIZE"} <= set(known) else None
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else by
    if "SLURM_JOB_ID" in environment:
        by = by or "Slurm"
        nodes = _first(environment, "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
        tasks = _first(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        ranks = ranks or tasks
        evenly = -(-tasks // nodes) if tasks else None
        per_node = _number(environment, "SLURM_NTASKS_PER_NODE") or evenly
        local = local or (per_node if by != "torchrun" else None)
    if local is None and ranks is not None and is_loopback(known.get("MASTER_ADDR", "")):
        local = ranks
    return Launch(known, by, ranks, local, nodes)


def _first(variables: Mapping[str, str], *names: str) -> int | None:
    return next((number for name in names if (number := _number(variables, name))), None)


def is_loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.") or address == "::1"


def _number(variables: Mapping[str, str], name: str) -> int | None:
    found = re.match(r"\d+", variables.get(name, "").strip())
    return int(found[0]) if found else None


@dataclass(frozen=True)
class Port:
    """A port. `asked` is False for the default port, which is used without MASTER_PORT. `owner` is
    the command that listens on the port, if known."""

    number: int
    asked: bool
    free: bool
    owner_pid: int | None = None
    owner: str | None = None

    def __str__(self) -> str:
        which = f"MASTER_PORT={self.number}" if self.asked else f"{self.number} (the default)"
        owner = "" if self.owner_pid is None else f" by process {self.owner_pid} ({self.owner})"
        return f"{which} is {'free' if self.free else 'in use' + owner}"


def inspect_port(environment: Mapping[str, str]) -> Port:
    asked = _number(environment, "MASTER_PORT")
    number = asked or DEFAULT_PORT
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # Like torch's store, treat a port that is closing as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", number))
            probe.listen(1)
    except OSError:
        pid, name = owner_of(number)
        return Port(number, asked is not None, False, pid, name)
    return Port(number, asked is not None, True)


def owner_of(port: int) -> tuple[int | None, str | None]:
    """Return the process that listens on a port, and its command. Both are None if unknown, for
    example if another user owns the process."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr:
                continue
            if connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return connection.pid, command[:120] or None
    return None, None


@dataclass(frozen=True)
class Address:
    """The rendezvous address. `connects` is None if no connection was tried."""

    name: str
    resolved: str | None
    connects: bool | None = None
    problem: str | None = None

    def __str__(self) -> str:
        resolves = f"is {self.resolved}" if self.resolved else "does not resolve"
        answers = {None: "", True: ", and responds", False: f", but fails: {self.problem}"}
        return f"{self.name} {resolves}{answers[self.connects]}"


def inspect_address(environment: Mapping[str, str]) -> Address | None:
    """Resolve MASTER_ADDR, and connect to it if another process should be listening."""
    name = environment.get("MASTER_ADDR")
    if not name:
        return None
    resolved, problem = resolve(name)
    port, rank = _number(environment, "MASTER_PORT"), _number(environment, "RANK")
    if resolved is None or not port or not rank:  # rank 0 opens the port itself
        return Address(name, resolved, None, problem)
    try:
        with socket.create_connection((resolved, port), timeout=ANSWER_SECONDS):
            return Address(name, resolved, True)
    except OSError as error:
        return Address(name, resolved, False, str(error))


def resolve(name: str) -> tuple[str | None, str | None]:
    """Return (address, None) or (None, reason). A lookup cannot be canceled, so it runs in a
    thread."""
    answers: list[tuple[str | None, str | None]] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answers.append((str(found[0][4][0]), None))
        except (OSError, UnicodeError) as error:
            answers.append((None, getattr(error, "strerror", None) or str(error)))

    thread = threading.Thread(target=ask, name="paralab-question", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    late = f"the name server did not respond within {ANSWER_SECONDS:g} s"
    return answers[0] if answers else (None, late)


@dataclass(frozen=True)
class Memory:
    """The memory limit and use of the container or job. `killed` counts the processes that were
    killed because memory ran out."""

    limit_bytes: int | None = None
    used_bytes: int | None = None
    killed: int | None = None


def inspect_cgroup(root: Path = Path("/sys/fs/cgroup")) -> Memory | None:
    """Read the container's memory limit and use from cgroup v2, or else from cgroup v1."""
    first = ("limit_in_bytes", "usage_in_bytes", "oom_control")
    for limit, used, events in (
        ("memory.max", "memory.current", "memory.events"),
        tuple(f"memory/memory.{name}" for name in first),
    ):
        if (root / limit).is_file():
            killed = re.search(r"^oom_kill (\d+)", _text(root / events), re.MULTILINE)
            most, now = _text(root / limit).strip(), _text(root / used).strip()
            is_limited = most.isdigit() and int(most) < 2**60  # a huge number means no limit
            return Memory(
                int(most) if is_limited else None,
                int(now) if now.isdigit() else None,
                int(killed[1]) if killed else None,
            )
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class Disk:
    path: str
    writable: bool
    free_bytes: int


def inspect_disk(path: Path) -> Disk:
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".paralab-"):
            writable = True
    except OSError:
        writable = False
    return Disk(str(path), writable, shutil.disk_usage(path).free)


def inspect_network() -> dict[str, int]:
    """Return the speed in Mbit/s of each active interface that reports its speed."""
    return {name: s.speed for name, s in psutil.net_if_stats().items() if s.isup and s.speed}
