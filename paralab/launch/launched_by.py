"""Detect the launcher: torchrun, srun, and others set environment variables for each process.

torchrun and compatible launchers  RANK WORLD_SIZE LOCAL_RANK GROUP_RANK MASTER_ADDR MASTER_PORT …
srun with multiple tasks            SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_NODEID …

torchrun provides an address for the rendezvous, and often serves a store there. srun provides
neither. So rank 0 takes a free port and writes its address to a file in the job's working
directory, which all nodes can see.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paralab.errors import UsageError
from paralab.launch.processes import INSIDE
from paralab.plan.grid import Place

LAUNCHED = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split()
BY_PREFIX = ("TORCHELASTIC_", "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID")


@dataclass(frozen=True)
class LaunchedRank:
    """This process's place in a job that torchrun, srun, or another launcher started."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    node: int | None  # the node number, or None if unknown
    attempt: str  # distinguishes this rendezvous from those of other jobs and restarts
    restarts: int = 0  # how many times the launcher has restarted the job
    address: str | None = None  # where the ranks rendezvous; None if rank 0 must choose it
    port: int | None = None
    served: bool = False  # whether the launcher itself serves a store at that address


def detect_launcher(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return this rank's place, or None if no launcher started this process."""
    if INSIDE in environment:
        return None
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _of_torchrun(environment)
    # An sbatch script also has SLURM_PROCID 0 and SLURM_NTASKS, but only a job step has tasks.
    if "SLURM_PROCID" in environment and (_number(environment, "SLURM_STEP_NUM_TASKS") or 1) > 1:
        return _of_srun(environment)
    return None


def _of_torchrun(environment: Mapping[str, str]) -> LaunchedRank:
    ranks = _number(environment, "WORLD_SIZE") or 1
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if ranks > 1 and missing:
        given = f"RANK={environment['RANK']} and WORLD_SIZE={ranks} are set"
        fix = "start the command with torchrun or srun, or unset RANK and WORLD_SIZE"
        raise UsageError(f"{given}, but not {' and '.join(missing)}.", fix=fix)
    run = environment.get("TORCHELASTIC_RUN_ID")
    restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT") or 0
    return LaunchedRank(
        launcher="torchrun" if run else "the launcher that set RANK and WORLD_SIZE",
        rank=_number(environment, "RANK") or 0,
        world_size=ranks,
        local_rank=_number(environment, "LOCAL_RANK"),
        node=_number(environment, "GROUP_RANK"),
        attempt=f"{run or 'none'}/{restarts}",
        restarts=restarts,
        address=environment.get("MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT"),
        served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _of_srun(environment: Mapping[str, str]) -> LaunchedRank:
    restarts = _number(environment, "SLURM_RESTART_COUNT") or 0
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "0"))
    attempt = f"{environment.get('SLURM_JOB_ID', '0')}-{step}"
    return LaunchedRank(
        launcher="srun",
        rank=_number(environment, "SLURM_PROCID") or 0,
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS") or 1,
        local_rank=_number(environment, "SLURM_LOCALID"),
        node=_number(environment, "SLURM_NODEID"),
        attempt=f"{attempt}-{restarts}" if restarts else attempt,
        restarts=restarts,
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if text and not text.isdigit():
        fix = f"unset {name}, or start the command with torchrun or srun"
        raise UsageError(f"{name}={text!r} is not a number.", fix=fix)
    return int(text) if text else None


def without_launch(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process that is not a rank. It does not contain RANK and
    similar variables, so that user code does not mistake the child for a rank."""
    return {
        name: text
        for name, text in environment.items()
        if name not in LAUNCHED and not name.startswith(BY_PREFIX)
    }


def refuse_inside() -> None:
    """Refuse to start ranks inside a rank of torchrun, Slurm, or paralab itself.

    Ranks import the script that contains the workload. If that script calls paralab at its top
    level, it would start itself over and over.
    """
    if INSIDE in os.environ:
        problem = "This file calls paralab when it is imported, and every rank imports it."
        raise UsageError(problem, fix='put the call under `if __name__ == "__main__":`')
    launched = detect_launcher()
    if launched and launched.world_size > 1:
        started = f"already started rank {launched.rank} of {launched.world_size}"
        problem = f"This command starts its own ranks, but {launched.launcher} {started}."
        raise UsageError(problem, fix="leave out torchrun or srun; only `paralab run` uses them")


def rendezvous_file(place: LaunchedRank) -> Path:
    """Return the path of the file to which rank 0 writes its address in an srun job. The file is in
    the job's working directory, the only folder that all nodes are known to share."""
    return Path(f".paralab-rendezvous-{place.attempt}").absolute()


def own_address() -> str:
    """Return the address at which other nodes reach this node. Slurm's names may not resolve."""
    nodes = _number(os.environ, "SLURM_STEP_NUM_NODES") or _number(os.environ, "SLURM_NNODES")
    if nodes in (None, 1):
        return "127.0.0.1"
    address = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "node", address]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
        given = re.search(r"NodeAddr=(\S+)", shown)
        address = given[1] if given else address
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address


def assign_places(facts: list[dict[str, Any]]) -> tuple[Place, ...]:
    """Determine each rank's place and its share of the cores from what the ranks report.

    Ranks with the same affinity mask share its cores. Slurm may also give each rank its own cores.

        machine A, cores 0-7    machine A, cores 0-7    machine B, cores 0-3
        4 cores                 4 cores                 4 cores
    """
    nodes = [fact["machine"] if fact["node"] is None else fact["node"] for fact in facts]
    masks = [(fact["machine"], tuple(fact["mask"])) for fact in facts]
    # Multiple nodes with the same name are one machine that simulates multiple nodes.
    named = {(node, fact["name"]) for node, fact in zip(nodes, facts, strict=True)}
    ambiguous = len(named) > len({name for _, name in named})

    places = []
    for rank, fact in enumerate(facts):
        given, number = fact["local_rank"], fact["node"]
        local_rank = nodes[:rank].count(nodes[rank]) if given is None else given
        name = f"{fact['name']}#{number}" if ambiguous and number is not None else fact["name"]
        cores = fact["cores"] / masks.count(masks[rank])
        places.append(Place(name, local_rank, tuple(fact["gpus"]), cores))
    return tuple(places)
