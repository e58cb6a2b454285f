"""Faults of a cluster: a lost link, a port that is taken, a node of Slurm that dies, a job that is
requeued.

    python bench/cluster_faults.py [slurm]        (root, iproute2, slurm-wlm and munge; what is missing is said)

The rows are those of `paralab faults`, with the same training and the same comparison in the end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import link  # noqa: E402

from paralab.disturbances import AT_STEP, EVERY, STEPS, Cell, Disturbance, Room, Trial  # noqa: E402
from paralab.faults import line_of, row_of  # noqa: E402
from paralab.record.reader import failures_of, read_events  # noqa: E402
from tests.slurm import cluster  # noqa: E402

TRIALS = 5
DOWN_SECONDS = 6.0


def lost_link(base: str):
    """The cable between two hosts is pulled out in a step, and put in again after six seconds."""

    def pull(up: bool) -> None:
        subprocess.run(
            ["ip", "-n", f"{base}-0", "link", "set", link.INTERFACE, "up" if up else "down"],
            check=True,
        )

    def disturb(d: Disturbance) -> Trial:
        process = d.start()
        d.wait_for_step(process, AT_STEP)
        at = time.time()
        pull(up=False)
        threading.Timer(DOWN_SECONDS, pull, [True]).start()
        code = d.end(process)
        folder = d.room.folder / d.name
        failures = failures_of(folder)
        starts = [
            events
            for attempt in range(1, len(failures) + 1)
            for events in read_events(folder, attempt).values()
        ]
        nexts = [
            begin["unix_seconds"] + step["end"] - begin["time"]
            for events in starts
            for begin in events[:1]
            for step in [event for event in events if event["event"] == "step"][:1]
        ]
        return Trial(
            outcome="recovered" if code == 0 and failures else "went on" if code == 0 else "LOST",
            named=not failures or "nobody is missing" in failures[0]["problem"],
            equal=d.equal(),
            orphans=d.orphans,
            noticed_seconds=failures[0]["unix_seconds"] - at if failures else None,
            next_step_seconds=min(nexts) - at if nexts else None,
            said=failures[0]["problem"] if failures else "",
        )

    return disturb


def port_in_use(d: Disturbance) -> Trial:
    """torchrun is given a port that another program has; ranks that paralab starts meet through a
    file and need none."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            "--nproc_per_node=2",
            "--rdzv-backend=static",
        ]
        launcher += [
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            "-m",
            "paralab",
            "run",
            "ddp",
            "--workload",
            "mlp:tiny",
        ]
        at = time.time()
        done = subprocess.run(
            launcher, cwd=d.room.folder, capture_output=True, text=True, timeout=120
        )
    words = done.stderr + done.stdout
    named = done.returncode != 0 and (
        "EADDRINUSE" in words or "address already in use" in words.lower()
    )
    return Trial(
        "stopped" if done.returncode else "LOST",
        named,
        None,
        0,
        time.time() - at,
        said=words.strip().splitlines()[-1],
    )


def slurm_fault(environment: dict[str, str], act):
    def disturb(d: Disturbance) -> Trial:
        process = d.start()
        folder = d.room.folder / d.name
        until = time.monotonic() + 60
        runs: list[Path] = []
        while time.monotonic() < until and process.poll() is None:
            runs = sorted(folder.glob("run-*"))
            if runs and any(
                e["event"] == "step" and e["step"] >= AT_STEP
                for events in read_events(runs[0]).values()
                for e in events
            ):
                break
            time.sleep(0.02)
        at = time.time()
        act(runs[0].name.split("-")[1] if runs else "0")
        code = d.end(process)
        runs = sorted(folder.glob("run-*"))
        results = [
            json.loads((run / "result.json").read_text())
            for run in runs
            if (run / "result.json").exists()
        ]
        weights = (runs[-1] if runs else folder) / "weights.pt"
        equal = weights.exists() and weights.read_bytes() == d.room.weights
        begins = [
            begin["unix_seconds"] + step["end"] - begin["time"]
            for run in runs[1:]
            for events in read_events(run).values()
            for begin in events[:1]
            for step in [event for event in events if event["event"] == "step"][:1]
        ]
        outcome = "LOST" if code or not results else "resumed" if len(runs) > 1 else "went on"
        lost = AT_STEP - results[-1]["begun_at_step"] if len(runs) > 1 and results else None
        said = d.said().strip().splitlines()[-1] if code else ""
        return Trial(
            outcome,
            code == 0,
            equal,
            d.orphans,
            None,
            min(begins) - at if begins else None,
            lost,
            said,
        )

    return disturb


def table(title: str, fault: str, room: Room, disturb) -> dict:
    cell = Cell(fault)
    row = row_of(cell, title, [room.trial(cell, disturb) for _ in range(TRIALS)])
    print(line_of(row), flush=True)
    for trial in row["trials"]:
        if not trial["named"] or trial["outcome"] == "LOST" or trial["equal"] is False:
            print("   ", trial, flush=True)
    return row


def main() -> None:
    print(f"mlp, ddp on 2 ranks, {STEPS} steps", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="paralab-faults-"))
    room = Room(folder, "mlp", PYTHONPATH=str(ROOT))
    room.undisturbed()
    if "slurm" not in sys.argv:
        table("port in use (torchrun)", "port", room, port_in_use)
        _link(folder, room)
    if reason := cluster.why_not():
        print(f"slurmd killed, requeue: not run: {reason}")
        return
    _slurm(folder, room)


def _link(folder: Path, room: Room) -> None:
    if reason := link.why_not():
        print(f"lost link between nodes: not run: {reason}")
    else:
        with link.link(2000) as (options, environment):
            over = Room(folder, "mlp", options, PYTHONPATH=str(ROOT), **environment)
            over.weights, over.seconds = room.weights, room.seconds
            over.number = 100
            table(
                "lost link between nodes",
                "link",
                over,
                lost_link(options[1].split()[3].removesuffix("-{rank}")),
            )


def _slurm(folder: Path, room: Room) -> None:
    with cluster.cluster() as environment:
        known = {**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        slurm = Room(folder, "mlp", ["--nodes", "2", "--slurm", "time=5"], **known)
        slurm.weights, slurm.seconds, slurm.number = room.weights, room.seconds, 200
        slurm.surviving = ["--checkpoint-every", str(EVERY)]  # it is Slurm that starts ranks again
        home = Path(environment["SLURM_CONF"]).parent

        def requeue(job: str) -> None:
            subprocess.run(
                ["scontrol", "requeue", job], env={**os.environ, **environment}, check=False
            )
            time.sleep(3)
            subprocess.run(
                ["scontrol", "update", f"JobId={job}", "StartTime=now"],
                env={**os.environ, **environment},
                check=False,
            )

        def kill_slurmd(job: str) -> None:
            os.kill(int((home / "n2.pid").read_text()), signal.SIGKILL)
            time.sleep(3)
            subprocess.run(
                ["slurmd", "-f", environment["SLURM_CONF"], "-N", "n2"],
                env={**os.environ, **environment},
                check=False,
            )

        table("requeue", "requeue", slurm, slurm_fault(environment, requeue))
        table(
            "slurmd killed, and started again",
            "slurmd",
            slurm,
            slurm_fault(environment, kill_slurmd),
        )


if __name__ == "__main__":
    main()
