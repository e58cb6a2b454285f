"""Inject cluster faults: a lost link, a port in use, a killed Slurm daemon, a requeued job.

    python3 -m bench.faults.cluster [slurm]

This needs root, iproute2, slurm-wlm, and munge, and reports which of them are missing. The columns,
the training, and the final comparison are the same as in `matrix.py`.
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
from collections.abc import Callable
from pathlib import Path

from bench import link
from bench.faults.matrix import format_line, make_row
from bench.faults.trial import (
    AT_STEP,
    EVERY,
    STEPS,
    FaultCase,
    FaultOutcome,
    FaultTrial,
    Workspace,
    first_step,
)
from paralab.record.reader import read_events, read_failures
from tests.slurm import cluster

ROOT = Path(__file__).resolve().parent.parent.parent
TRIALS = 5
DOWN_SECONDS = 6.0
BACK_SECONDS = 3  # delay before a killed slurmd or a requeued job starts again


def lose_link(base: str) -> Callable[[FaultTrial], FaultOutcome]:
    """Take the link between two nodes down during a step, and bring it up after six seconds."""

    def set_link(state: str) -> None:
        command = ["ip", "-n", f"{base}-0", "link", "set", link.INTERFACE, state]
        subprocess.run(command, check=True)

    def cause(trial: FaultTrial) -> FaultOutcome:
        process = trial.start()
        trial.wait_for_step(process, AT_STEP)
        at = time.time()
        set_link("down")
        threading.Timer(DOWN_SECONDS, set_link, ["up"]).start()
        code = trial.end(process)

        failures = read_failures(trial.folder)
        problem = failures[0]["problem"] if failures else ""
        first, _ = first_step(trial.folder, after=at)
        return FaultOutcome(
            outcome="LOST" if code else "recovered" if failures else "went on",
            named=not failures or "network" in problem,
            equal=trial.weights_equal(),
            orphans=trial.orphans,
            noticed_seconds=failures[0]["unix_seconds"] - at if failures else None,
            next_step_seconds=first - at if first else None,
            message=problem,
        )

    return cause


def take_port(trial: FaultTrial) -> FaultOutcome:
    """Give torchrun a port that another program uses. Ranks that paralab starts need no port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2"),
            *("--rdzv-backend=static", "--master-addr=127.0.0.1"),
            f"--master-port={taken.getsockname()[1]}",
        ]
        paralab = ["-m", "paralab", "run", "ddp", "--workload", "mlp:tiny"]
        at = time.time()
        done = subprocess.run(
            [*torchrun, *paralab],
            cwd=trial.workspace.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
    output = done.stderr + done.stdout
    in_use = "EADDRINUSE" in output or "address already in use" in output.lower()
    return FaultOutcome(
        outcome="stopped" if done.returncode else "LOST",
        named=done.returncode != 0 and in_use,
        equal=None,
        orphans=0,
        noticed_seconds=time.time() - at,
        message=output.strip().splitlines()[-1],
    )


def disturb_job(act: Callable[[str], None]) -> Callable[[FaultTrial], FaultOutcome]:
    """Call `act` with the Slurm job id after the job has trained a few steps."""

    def cause(trial: FaultTrial) -> FaultOutcome:
        process = trial.start()
        job = _wait_for_job(process, trial.folder)
        at = time.time()
        act(job)
        code = trial.end(process)

        runs = sorted(trial.folder.glob("run-*"))
        paths = [run / "result.json" for run in runs]
        results = [json.loads(path.read_text()) for path in paths if path.exists()]
        restarted = len(runs) > 1
        firsts = [first for run in runs[1:] if (first := first_step(run, after=0)[0])]
        begun = results[-1]["begun_at_step"] if restarted and results else None
        return FaultOutcome(
            outcome="LOST" if code or not results else "resumed" if restarted else "went on",
            named=code == 0,
            equal=bool(runs) and trial.weights_equal(f"{trial.name}/{runs[-1].name}"),
            orphans=trial.orphans,
            next_step_seconds=min(firsts) - at if firsts else None,
            steps_lost=None if begun is None else AT_STEP - begun,
            message=trial.output().strip().splitlines()[-1] if code else "",
        )

    return cause


def _wait_for_job(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait until the job reaches the fault's step, and return its Slurm job id."""
    until = time.monotonic() + 60
    runs: list[Path] = []
    while time.monotonic() < until and process.poll() is None:
        runs = sorted(folder.glob("run-*"))
        if runs and any(
            event["event"] == "step" and event["step"] >= AT_STEP
            for events in read_events(runs[0]).values()
            for event in events
        ):
            break
        time.sleep(0.02)
    return runs[0].name.split("-")[1] if runs else "0"


def print_row(
    title: str,
    fault: str,
    workspace: Workspace,
    cause: Callable[[FaultTrial], FaultOutcome],
) -> None:
    case = FaultCase(fault)
    outcomes = [workspace.try_fault(case, cause) for _ in range(TRIALS)]
    print(format_line(make_row(case, title, outcomes)), flush=True)
    for outcome in outcomes:
        if not outcome.survived:
            print("   ", outcome, flush=True)


def main() -> None:
    print(f"mlp, ddp on 2 ranks, {STEPS} steps", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="paralab-faults-"))
    workspace = Workspace(folder, "mlp", PYTHONPATH=str(ROOT))
    workspace.run_undisturbed()
    if "slurm" not in sys.argv:
        print_row("port in use (torchrun)", "port", workspace, take_port)
        _try_link(workspace)
    if reason := cluster.why_not():
        print(f"slurmd killed, requeue: not run: {reason}")
    else:
        _try_slurm(workspace)


def _try_link(undisturbed: Workspace) -> None:
    if reason := link.why_not():
        print(f"lost link between nodes: not run: {reason}")
        return
    with link.link(2000) as (options, environment):
        workspace = _like(undisturbed, 100, Workspace(undisturbed.folder, "mlp", options))
        workspace.environment |= {"PYTHONPATH": str(ROOT), **environment}
        base = options[1].split()[3].removesuffix("-{rank}")
        print_row("lost link between nodes", "link", workspace, lose_link(base))


def _try_slurm(undisturbed: Workspace) -> None:
    with cluster.cluster() as environment:
        both = {**os.environ, **environment}
        options = ["--nodes", "2", "--slurm", "time=5"]
        # Slurm, not paralab, restarts the ranks.
        restarting = ["--checkpoint-every", str(EVERY)]
        workspace = Workspace(undisturbed.folder, "mlp", options, restarting)
        workspace = _like(undisturbed, 200, workspace)
        workspace.environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}

        def requeue(job: str) -> None:
            subprocess.run(["scontrol", "requeue", job], env=both, check=False)
            time.sleep(BACK_SECONDS)
            start = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
            subprocess.run(start, env=both, check=False)

        def kill_slurmd(job: str) -> None:
            config = environment["SLURM_CONF"]
            os.kill(int((Path(config).parent / "n2.pid").read_text()), signal.SIGKILL)
            time.sleep(BACK_SECONDS)
            subprocess.run(["slurmd", "-f", config, "-N", "n2"], env=both, check=False)

        print_row("requeue", "requeue", workspace, disturb_job(requeue))
        print_row("slurmd killed and restarted", "slurmd", workspace, disturb_job(kill_slurmd))


def _like(undisturbed: Workspace, number: int, workspace: Workspace) -> Workspace:
    """Make the workspace compare with this undisturbed run, and number its trials from `number`."""
    workspace.weights, workspace.seconds = undisturbed.weights, undisturbed.seconds
    workspace.number = number
    return workspace


if __name__ == "__main__":
    main()
