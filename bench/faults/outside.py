"""Cause each fault: in a rank (`bench/faults/inside.py`), or from outside the run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from bench.faults.trial import (
    AT_STEP,
    EVERY,
    NUM_RANKS,
    STEPS,
    FaultOutcome,
    FaultTrial,
    first_step,
    processes_of,
)
from paralab.record.checkpoints import checkpoints
from paralab.record.reader import read_failures

# Fault inside a rank -> text that the reported cause must contain.
IN_RANKS = {
    "kill": "SIGKILL",
    "segv": "SIGSEGV",
    "exception": "ValueError",
    "exit0": "code 0",
    "stop": "SIGSTOP",
    "gil": "GIL",
    "memory": "memory",
    "nan": "nan",
    "slow": "",
}


def inject(trial: FaultTrial) -> FaultOutcome:
    """Inject a fault into a rank and expect a restart. A straggler only needs to be named."""
    case = trial.case
    at = {"start": -1, "step": AT_STEP, "save": AT_STEP}[case.phase or "step"]
    at = 0 if case.fault == "slow" else at
    process = trial.start_with(kind=case.fault, rank=case.rank, phase=case.phase, step=at)
    code = trial.end(process)
    if code or not trial.mark.exists():
        return FaultOutcome("LOST", False, None, trial.orphans, message=trial.error())
    if case.fault == "slow":
        result = json.loads((trial.folder / "result.json").read_text())
        straggler = result["metrics"]["straggler"]
        named = bool(straggler) and straggler["rank"] == case.rank
        return FaultOutcome("went on", named, trial.weights_equal(), trial.orphans)

    mark = json.loads(trial.mark.read_text())
    happened = mark["unix_seconds"]
    failures = read_failures(trial.folder)
    problem = failures[0]["problem"] if failures else ""
    first, begun = first_step(trial.folder, after=happened)
    return FaultOutcome(
        outcome="recovered" if failures else "LOST",
        named=problem.startswith(f"Rank {case.rank} ") and IN_RANKS[case.fault] in problem,
        equal=trial.weights_equal(),
        orphans=trial.orphans,
        noticed_seconds=failures[0]["unix_seconds"] - happened if failures else None,
        next_step_seconds=first - happened if first else None,
        steps_lost=max(0, mark["step"] - begun) if begun is not None else None,
        message=problem,
    )


def kill_any_rank(trial: FaultTrial) -> FaultOutcome:
    """Kill a random rank at a random moment between its start and the end of training."""
    dice = random.Random(trial.name)
    process = trial.start()
    ranks: list[psutil.Process] = []
    while process.poll() is None and len(ranks) < NUM_RANKS:
        time.sleep(0.01)
        ranks = [each for each in processes_of(process.pid) if _name(each).startswith("rank ")]
    time.sleep(dice.uniform(0.0, trial.workspace.seconds))
    return _kill(trial, process, dice.choice(ranks))


def kill_template(trial: FaultTrial) -> FaultOutcome:
    """Kill the template process. Its forked ranks could keep running, but no process would collect
    their exit codes."""
    process = trial.start()
    trial.wait_for_step(process, AT_STEP)
    (template,) = [each for each in processes_of(process.pid) if _name(each).startswith("python")]
    return _kill(trial, process, template, also="process that")


def _kill(
    trial: FaultTrial, process: subprocess.Popen[bytes], victim: psutil.Process, also: str = ""
) -> FaultOutcome:
    at = time.time()
    with suppress(psutil.Error):  # psutil checks that the pid still belongs to this process
        victim.kill()
    code = trial.end(process)

    failures = read_failures(trial.folder)
    if not failures and code == 0:  # killed after it finished its work
        return FaultOutcome("went on", True, trial.weights_equal(), trial.orphans)
    problem = failures[0]["problem"] if failures else ""
    first, _ = first_step(trial.folder, after=at)
    return FaultOutcome(
        outcome="recovered" if code == 0 else "LOST",
        named=" killed" in problem and also in problem,
        equal=trial.weights_equal(),
        orphans=trial.orphans,
        noticed_seconds=failures[0]["unix_seconds"] - at if failures else None,
        next_step_seconds=first - at if first else None,
        message=problem or trial.error(),
    )


def send(*signals: int, expected: int) -> Callable[[FaultTrial], FaultOutcome]:
    """Send signals to the launcher, expect an exit code, and resume."""

    def cause(trial: FaultTrial) -> FaultOutcome:
        process = trial.start()
        trial.wait_for_step(process, AT_STEP)
        at = time.time()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.02)
        code = trial.end(process)
        steps = [event["step"] + 1 for event in trial.events() if event["event"] == "step"]
        return trial.resume(at, named=code == expected, reached=max(steps, default=0))

    return cause


def flip_bit(trial: FaultTrial) -> FaultOutcome:
    """Stop the run, flip one bit in its newest checkpoint, and resume."""
    process = trial.start()
    trial.wait_for_step(process, AT_STEP)
    process.send_signal(signal.SIGTERM)
    trial.end(process)

    newest = checkpoints(trial.checkpoints)[-1]
    data = max(newest.path.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))

    outcome = trial.resume(time.time(), named=False, reached=newest.step)
    output = trial.output(f"{trial.name}-resumed")
    named = newest.path.name in output and data.name in output
    return FaultOutcome(
        outcome.outcome,
        named,
        outcome.equal,
        outcome.orphans,
        next_step_seconds=outcome.next_step_seconds,
        steps_lost=outcome.steps_lost,
    )


def cut_log(trial: FaultTrial) -> FaultOutcome:
    """Cut the last bytes off a rank's event file during the run."""
    process = trial.start()
    trial.wait_for_step(process, AT_STEP)
    path = trial.folder / "events" / "rank1.jsonl"
    os.truncate(path, max(0, path.stat().st_size - 150))
    code = trial.end(process)
    result = json.loads((trial.folder / "result.json").read_text()) if code == 0 else {}
    named = result.get("reached_step") == STEPS
    outcome = "went on" if code == 0 else "LOST"
    return FaultOutcome(outcome, named, trial.weights_equal(), trial.orphans)


def fill_disk(trial: FaultTrial) -> FaultOutcome:
    """Fill the checkpoint disk just before the second save, free the space, and resume."""
    trial.checkpoints.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1g", "paralab", str(trial.checkpoints)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        filler = trial.checkpoints.resolve() / "filler"
        process = trial.start_with(
            kind="fill", rank=0, phase="write", step=2 * EVERY, path=str(filler)
        )
        code = trial.end(process)
        at = time.time()
        if trial.mark.exists():
            at = json.loads(trial.mark.read_text())["unix_seconds"]
        named = code != 0 and any(
            words in trial.output() for words in ("No space left", "are free")
        )
        filler.unlink(missing_ok=True)
        return trial.resume(at, named, reached=2 * EVERY)
    finally:
        unmount = ["umount", "-l", str(trial.checkpoints)]
        subprocess.run(unmount, check=False, capture_output=True)


FROM_OUTSIDE: dict[str, Callable[[FaultTrial], FaultOutcome]] = {
    "random": kill_any_rank,
    "template": kill_template,
    "disk": fill_disk,
    "bit flip": flip_bit,
    "cut log": cut_log,
    "sigterm": send(signal.SIGTERM, expected=75),
    "sigusr1": send(signal.SIGUSR1, expected=75),
    "ctrl-c": send(signal.SIGINT, expected=75),
    "ctrl-c twice": send(signal.SIGINT, signal.SIGINT, expected=130),
    "launcher": send(signal.SIGKILL, expected=-signal.SIGKILL),
}


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
