"""From a request to a result: look, plan, launch, read the run folder. What `paralab run` and
`paralab.run` share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from paralab.analyse.result import result_of
from paralab.analyse.trace import trace_of
from paralab.errors import Interrupted, ParalabError, Paused, RunFailed, UsageError
from paralab.launch.inspect import look_at
from paralab.launch.jobs import TrainingJob
from paralab.launch.launched_by import joined
from paralab.launch.processes import INSIDE
from paralab.launch.restart import RestartPolicy, train
from paralab.machine.host import Machine, threads_asked, usable_cores
from paralab.machine.precision import probe_cpu
from paralab.machine.signals import exit_code_of, name_of, number_of
from paralab.plan.check import check
from paralab.plan.grid import Place
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.plan.resolve import needs_layers, resolve
from paralab.plan.sharding import needs_units
from paralab.record.folder import RunFolder
from paralab.show.tensorboard import require_tensorboard, write_tensorboard
from paralab.units import count, size
from paralab.workload.reference import check_reference
from paralab.workload.summary import Summary

Watch = Callable[
    [Plan, RunFolder], Callable[[], None]
]  # given the plan and the folder: what to do at every poll
probe_once = cache(probe_cpu)
_look = cache(look_at)


def look_once(
    workload: str,
    device: str,
    layers: bool,
    samples: int | None,
    threads: int | None,
    units: bool = False,
) -> tuple[Machine, Summary]:
    """As `look_at`, but the same question is asked once: an experiment has many set-ups of one
    workload."""
    refuse_inside()
    return _look(workload, device, layers, samples, threads, units)


def look_again() -> None:
    """A workload's file may have been changed since, in a notebook."""
    _look.cache_clear()


class Team(Protocol):
    """Ranks that something else has launched, of which this process is rank 0
    (`paralab.launch.joined_ranks`)."""

    places: tuple[Place, ...]

    def train(
        self,
        job: TrainingJob,
        survival: RestartPolicy,
        on_poll: Callable[[], None],
        origin_seconds: float,
        say: Callable[[str], None],
    ) -> tuple[RunFailed | None, bool]: ...


def make_plan(
    request: Request, places: Sequence[Place] = (), cuts: Sequence[str] = ()
) -> tuple[Plan, Machine, Summary]:
    """Resolve a request; nothing is started but the child process that looks. `places`: where the
    ranks already are. `cuts`: where the stages of the checkpoint begin from which the run
    resumes."""
    if not places:
        refuse_inside()
    check(request)
    request = replace(request, workload=check_reference(request.workload))
    machine, summary = look_at(
        request.workload,
        request.device,
        needs_layers(request.strategy),
        _samples_at_once(request),
        _one_device_threads(request),
        needs_units(request.strategy),
    )
    return (
        resolve(request, machine, summary, probe_once, threads_asked(), places, cuts),
        machine,
        summary,
    )


def refuse_inside() -> None:
    """Do not start ranks inside a rank: of torchrun, of Slurm, or of paralab itself (a script that
    calls paralab at its top level and is imported by the ranks for its workload would start itself
    again and again)."""
    if INSIDE in os.environ:
        raise UsageError(
            "This file calls paralab when it is imported, and the ranks must import it to find the workload in it.",
            fix='put the call under `if __name__ == "__main__":`',
        )
    launched = joined()
    if launched and launched.world_size > 1:
        raise UsageError(
            f"This starts its own ranks, and this process is already rank {launched.rank} of {launched.world_size} of "
            f"{launched.launcher}.",
            fix="leave torchrun or srun out; the command that joins them is `paralab run`",
        )


def _samples_at_once(request: Request) -> int | None:
    """How many samples pass through a stage together, for measuring its layers; None: the
    workload's own batch."""
    if request.batch_size is None:
        return None
    parts = (request.replicas or 1) * (request.accumulate or 1) * (request.micro_batches or 1)
    return max(1, request.batch_size // parts)


def _one_device_threads(request: Request) -> int:
    devices = (request.replicas or (2 if request.strategy == "hybrid" else 1)) * (
        request.stages or 2
    )
    return request.threads_per_device or threads_asked() or max(1, usable_cores() // devices)


def run(
    request: Request,
    out: Path | None = None,
    save_weights: bool = False,
    profile: bool = False,
    watch: Watch = lambda plan, folder: lambda: None,
    tensorboard: Path | None = None,
    survival: RestartPolicy | None = None,
    say: Callable[[str], None] = lambda line: None,
    team: Team | None = None,
) -> dict[str, Any]:
    """Train as asked; return the result (`--json`). Raises a ParalabError, after which the run
    folder is readable all the same. `team`: ranks that are there already; without one they are
    started here."""
    if tensorboard:
        require_tensorboard()
        try:
            tensorboard.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--tensorboard {tensorboard} cannot be made: {error.strerror}.",
                fix="another folder",
            ) from error
    survival = survival or RestartPolicy()
    survival.check()
    plan, machine, summary = make_plan(
        request, team.places if team else (), survival.cuts(request.strategy)
    )
    folder = RunFolder.create(out, f"{plan.strategy}_{slug(summary.name)}")
    record_plan(folder, plan, machine, summary)
    extras = {"save_weights": folder.weights_path, "profile": folder.profile_path}
    wanted = {"save_weights": save_weights, "profile": profile}
    job = TrainingJob(
        plan, folder, {name: str(path.resolve()) for name, path in extras.items() if wanted[name]}
    )
    on_poll = watch(plan, folder)
    origin = time.perf_counter()
    try:
        with survival.holding():
            failed, saved = (team.train if team else train)(job, survival, on_poll, origin, say)
    except KeyboardInterrupt as error:
        number = number_of(error)
        result = finish(folder, time.perf_counter() - origin, tensorboard)
        raise Interrupted(
            f"Stopped by {name_of(number)} after {result['reached_step']} of {plan.num_steps} steps. All ranks have ended; "
            f"the run folder is {folder.path}",
            exit_code=exit_code_of(number),
        ) from None
    result = finish(
        folder, time.perf_counter() - origin, tensorboard, must_write=not failed and not saved
    )
    if failed:
        raise failed
    if saved:
        done = (
            f"Stopped and saved after {result['reached_step']}"
            if result["reached_step"]
            else "Stopped before the first"
        )
        raise Paused(
            f"{done} of {plan.num_steps} steps; the run folder is {folder.path}",
            fix="the same command with --resume goes on",
        )
    return result


def finish(
    folder: RunFolder,
    wall_seconds: float | None = None,
    tensorboard: Path | None = None,
    must_write: bool = True,
) -> dict[str, Any]:
    """However the run ended: its result, then what is drawn from it, which must not cost the result
    whatever is wrong with it. `must_write`: nothing else is worth telling; else the disk may be
    full because of what is told."""
    result = result_of(folder.path) | (
        {} if wall_seconds is None else {"wall_seconds": round(wall_seconds, 3)}
    )
    try:
        folder.write_result(result)
    except ParalabError:
        if must_write:
            raise
    try:
        folder.write_trace(trace_of(folder.path))
    except Exception as error:
        result["warnings"].append(f"trace.json was not written: {error}")
    try:
        if tensorboard:
            write_tensorboard(folder.path, tensorboard)
    except Exception as error:
        result["warnings"].append(f"nothing was written for TensorBoard in {tensorboard}: {error}")
    return result


def record_plan(folder: RunFolder, plan: Plan, machine: Machine, summary: Summary) -> None:
    """What will be trained, before it is."""
    folder.write_manifest(
        machine=asdict(machine),
        plan=plan.to_json(),
        workload=asdict(summary),
        data_path=summary.data_path,
        constraints=constraints(plan, machine, summary),
    )


def constraints(plan: Plan, machine: Machine, summary: Summary) -> list[str]:
    """What the result depends on, in words (mission H7.4)."""
    gpus = machine.gpus if plan.device == "cuda" else ()
    where = ", ".join(gpu.name for gpu in gpus) or machine.cpu
    lines = [
        f"model: {count(summary.parameters)} parameters, {size(summary.parameter_bytes)}",
        f"device: {plan.device} ({where}), {plan.threads_per_device} threads per device, {machine.cores} cores",
        f"backend: {plan.backend or 'none, one process'}; torch {machine.torch}, CUDA {machine.cuda or 'none'}",
        f"memory: {size(machine.memory_bytes)} of the host"
        + "".join(f", {size(gpu.memory_bytes)} of {gpu.name}" for gpu in gpus),
        f"precision: {plan.precision}; batch: {plan.arithmetic}; seed {plan.seed}",
    ]
    return lines + list(plan.remarks) + list(plan.differences)


def slug(name: str) -> str:
    return "".join(
        letter if letter.isalnum() else "-" for letter in name.removesuffix(".py")
    ).strip("-")
