"""Choose the checkpoint that a run starts from. Only the launcher does this, for all ranks."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from paralab.errors import UsageError, naming, refusing
from paralab.launch.job import Print
from paralab.launch.run_options import RunOptions
from paralab.plan.plan import Plan
from paralab.record.checkpoints import (
    TOPOLOGY,
    Checkpoint,
    CheckpointPolicy,
    last_good,
    require_same_training,
)
from paralab.units import plural

try:
    import fcntl
except ImportError:  # these locks exist only on Unix
    fcntl = None  # type: ignore[assignment]

LOCK = ".in-use"  # identifies the run that writes to the folder


@contextmanager
def lock_checkpoints(directory: Path | None) -> Iterator[None]:
    """Lock the folder against other runs. The system releases the lock when this process dies."""
    if directory is None or fcntl is None:
        yield
        return
    with refusing(f"--checkpoint {directory} is not writable", fix="another folder"):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("a+")

    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            problem = f"--checkpoint {directory} is in use by another run: {file.read().strip()}."
            fix = "another folder, or wait for that run to end and use --resume"
            raise UsageError(problem, fix) from None
        except OSError:
            pass  # this file system has no locks
        with naming(file.name):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


def choose_checkpoint(options: RunOptions, plan: Plan, say: Print) -> CheckpointPolicy | None:
    """Return the checkpoint policy. If the run resumes, the policy contains the newest intact
    checkpoint. Report damaged checkpoints and rename them."""
    directory = options.checkpoint
    if directory is None:
        return None
    every, keep = options.checkpoint_every, options.keep_checkpoints
    fresh = CheckpointPolicy(str(directory.resolve()), every, keep)
    if not options.resume:
        return fresh

    good, bad = last_good(directory)
    for checkpoint in bad:
        say(f"{checkpoint.path} cannot be used: {checkpoint.problem}.")
    if good is not None:
        require_same_training(good.manifest, plan.training, good.path)
        if good.step > plan.num_steps:
            counts = f"{plural(good.step, 'step')}, but this run has only {plan.num_steps}"
            problem = f"--resume: {good.path} was saved after {counts}."
            raise UsageError(problem, fix=f"--steps {good.step + 1} or more")
    elif not all(checkpoint.half_written for checkpoint in bad):
        reasons = "; ".join(f"{each.path.name}: {each.problem}" for each in bad)
        fix = "restore a checkpoint from a backup, or start over with another --checkpoint DIR"
        raise UsageError(f"--resume: no checkpoint in {directory} is usable ({reasons}).", fix)
    for checkpoint in bad:
        set_aside(checkpoint)

    if good is None:
        say(f"{directory} contains no checkpoint. Starting from the beginning.")
        return fresh
    topology = good.manifest["topology"]
    same = all(
        topology.get(name, 1 if name == "shards" else None) == getattr(plan, name)
        for name in TOPOLOGY
    )
    if good.manifest.get("replicas_differ") and not same:
        raise UsageError(
            f"--resume: {good.path} was saved between two averages, so each of its "
            f"{topology['replicas']} replicas has its own parameters.",
            fix=f"{topology['strategy']} --replicas {topology['replicas']}, or let it finish first",
        )
    return replace(
        fresh,
        resume=str(good.path.resolve()),
        done=good.step,
        samples=good.manifest["samples_seen"],
        same_topology=same,
    )


def set_aside(checkpoint: Checkpoint) -> None:
    """Free the name for a new checkpoint: rename a damaged one, or delete a half-written one."""
    if checkpoint.half_written:
        shutil.rmtree(checkpoint.path, ignore_errors=True)
        return
    number = 1
    while (aside := checkpoint.path.with_name(f"damaged-{checkpoint.path.name}-{number}")).exists():
        number += 1
    checkpoint.path.rename(aside)
