"""A real Slurm on this machine: a controller and nodes with fake GPUs, in one folder and on free
ports. It needs root and the Debian packages slurm-wlm and munge, but neither systemd nor cgroups.
All nodes are this host.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NODES, CPUS = 2, 4
GPU_FILES = ("/dev/null", "/dev/zero")  # to Slurm, a GPU is a file; these files exist everywhere
START_SECONDS = 120
BEHIND = ("/usr/sbin", "/usr/bin")  # the daemons are not in a user's PATH

CONFIGURATION = """\
ClusterName=paralab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=2
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=3
MailProg=/bin/true
GresTypes=gpu
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=01:00:00 State=UP
PartitionName=short Nodes=n1 MaxTime=00:02:00 State=UP
"""
NODE = (
    "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN"
)


def why_not() -> str | None:
    """Return what this machine lacks for Slurm, or None."""
    if os.geteuid():
        return "a Slurm of our own needs root"
    missing = [
        name
        for name in ("slurmctld", "slurmd", "sbatch", "srun", "munged")
        if not _find_program(name)
    ]
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)" if missing else None


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start Slurm, and yield the environment in which sbatch, srun, and scontrol use it."""
    folder = Path(
        tempfile.mkdtemp(prefix="paralab-slurm-")
    )  # do not use pytest's folder, because munged rejects a folder that others cannot enter
    folder.chmod(0o755)
    try:
        environment = _configure(folder)
        try:
            _start(folder, environment)
            yield environment
        finally:
            _cancel_all(environment)
            _stop(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> dict[str, str]:
    host, ports = socket.gethostname().partition(".")[0], _free_ports(NODES + 1)
    nodes = [
        NODE.format(number=n, host=host, port=ports[n], cpus=CPUS, gpus=len(GPU_FILES))
        for n in range(1, NODES + 1)
    ]
    text = CONFIGURATION.format(host=host, folder=folder, ports=ports, nodes="\n".join(nodes))
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(
        "".join(f"NodeName=n[1-{NODES}] Name=gpu File={file}\n" for file in GPU_FILES)
    )
    (folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n"
    )
    for name in ("state", "munge", *(f"spool/n{n}" for n in range(1, NODES + 1))):
        (folder / name).mkdir(parents=True)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    return {"SLURM_CONF": str(folder / "slurm.conf")}


def _start(folder: Path, environment: dict[str, str]) -> None:
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    configuration = ["-f", environment["SLURM_CONF"]]
    commands = [
        [_find_program("munged"), *munge, f"--socket={folder}/munge/socket"],
        [_find_program("slurmctld"), "-c", *configuration],
    ]
    commands += [
        [_find_program("slurmd"), *configuration, "-N", f"n{n}"] for n in range(1, NODES + 1)
    ]
    for command in commands:
        subprocess.run(
            command,
            check=True,
            env={**os.environ, **environment},
            timeout=START_SECONDS,
            capture_output=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while idle(environment) < NODES:
        if time.monotonic() > deadline:
            raise TimeoutError(
                "the nodes did not come up:\n" + (folder / "slurmctld.log").read_text()[-2000:]
            )
        time.sleep(0.1)


def idle(environment: dict[str, str]) -> int:
    """Return the number of idle nodes."""
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--partition=debug"]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    return len([line for line in done.stdout.splitlines() if " idle" in line])


def _cancel_all(environment: dict[str, str]) -> None:
    """End what a failed test has left: a job's processes outlive the node that started them."""
    known = {**os.environ, **environment}
    with suppress(subprocess.SubprocessError, OSError):
        subprocess.run(
            ["scancel", "--user=root"], env=known, timeout=START_SECONDS, capture_output=True
        )
    deadline = time.monotonic() + 10
    while idle(environment) < NODES and time.monotonic() < deadline:
        time.sleep(0.1)


def _stop(folder: Path) -> None:
    """End the nodes first and the authentication last, each by the process ID in its file."""
    for path in [*folder.glob("n*.pid"), folder / "slurmctld.pid", folder / "munge" / "pid"]:
        with suppress(OSError, ValueError):
            pid = int(path.read_text())
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 10
            while _runs(pid):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    break
                time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _find_program(name: str) -> str:
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(BEHIND)) or ""


def _free_ports(number: int) -> list[int]:
    """Hold all ports while choosing, so that none is returned twice."""
    held = [socket.socket() for _ in range(number)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
