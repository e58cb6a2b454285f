"""Slurm job scripts. Pure functions turn `--nodes 2 --slurm partition=gpu,gres=gpu:4,time=10:00`
into the text that `sbatch` reads.

Users can also edit the script and submit it by hand.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paralab.errors import Paused, UsageError
from paralab.plan.option import to_words
from paralab.plan.request import Request, cells_per_replica, has_process_per_cell, with_schedule
from paralab.units import plural

Options = Mapping[str, str | None]  # sbatch's long options without their dashes; None for a flag

# These strategies use one process, unless they have a --schedule.
ONE_PROCESS = ("single", "dp", "mp", "pipeline")
WARN_SECONDS = 60  # Slurm sends SIGUSR1 this long before the time limit
# Do not ask for the signal in a shorter job: Slurm would send it soon after the start.
SHORTEST_WARNED_SECONDS = 300

FLAGS = (
    "contiguous exclusive hold no-kill no-requeue overcommit oversubscribe reboot requeue "
    "spread-job use-min-nodes"
).split()
OURS = {
    "output": "paralab reads the job's output from slurm-JOB.out in the run folder",
    "error": "paralab reads the job's errors from slurm-JOB.out in the run folder",
    "open-mode": "a requeued job appends to its output",
    "chdir": "the job runs in the current folder",
    "wrap": "paralab writes the script",
    "array": "each command starts one run",
    "clusters": "paralab follows the job in sbatch's default cluster",
    "test-only": "use --dry-run to print the script",
    "wait": "paralab waits for the job anyway",
    "parsable": "paralab parses sbatch output",
}


def parse_options(text: str) -> dict[str, str | None]:
    """Parse `partition=gpu,mem="a,b",hold` into {"partition": "gpu", "mem": "a,b", "hold": None}."""

    def refuse(problem: str, fix: str) -> UsageError:
        return UsageError(f"--slurm {text!r}: {problem}.", fix=fix)

    parts = shlex.shlex(text, posix=True)
    parts.whitespace, parts.whitespace_split, parts.commenters, parts.escape = ",", True, "", ""
    options: dict[str, str | None] = {}
    try:
        words = list(parts)
    except ValueError:
        raise refuse("it is not key=value,…", "--slurm partition=NAME,time=10:00") from None
    for word in words:
        name, equals, value = word.strip().removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            raise refuse(f"{name!r} is not an sbatch long option", "partition=, gres=, time=, …")
        if not equals and name not in FLAGS:
            quote = f'{name}=VALUE; quote a value that contains commas: constraint="a,b"'
            problem = f"{name!r} has no value and is not an sbatch flag"
            raise refuse(problem, f"{quote}. Flags: {', '.join(FLAGS)}")
        if equals and not (value and value.isprintable()):
            raise refuse(f"{name} has no value", f"{name}=VALUE, or leave it out")
        if name in OURS:
            raise UsageError(f"--slurm {name} cannot be set: {OURS[name]}.", f"leave out {name}")
        if name in options:
            raise refuse(f"{name} appears twice", f"one {name}; quote a value that contains commas")
        options[name] = value if equals else None
    return options


@dataclass(frozen=True)
class Allocation:
    """The resources to request from Slurm."""

    nodes: int
    tasks: int  # one per rank
    per_node: int  # at most this many ranks on each node
    options: Options  # all other sbatch options


def allocate(request: Request, nodes: int | None, options: Options) -> Allocation:
    """Choose the number of ranks: one per replica if --replicas is given, otherwise one per task or
    GPU. Without any of these, use one rank per node (two if there is only one node).

    2 nodes, gres=gpu:4           8 ranks, 4 per node
    2 nodes, gres=gpu:4, hybrid   4 ranks, each with a GPU for each of its 2 stages
    2 nodes, --replicas 3         3 ranks, at most 2 per node
    2 nodes, ntasks-per-node=2    4 ranks
    2 nodes                       2 ranks
    """
    rest = dict(options)
    if nodes is not None and "nodes" in rest:
        problem = f"--nodes {nodes} and --slurm nodes={rest['nodes']} both set the number of nodes."
        raise UsageError(problem, fix="only --nodes")
    names = [name for name in ("nodes", "ntasks", "ntasks-per-node") if name in rest]
    given = {name: _number(name, rest.pop(name)) for name in names}
    nodes = given.get("nodes", 1 if nodes is None else nodes)
    tasks, per_node = given.get("ntasks"), given.get("ntasks-per-node")
    if nodes < 1:
        raise UsageError(f"--nodes {nodes} is not a positive number.", fix="--nodes 1 or more")

    request = with_schedule(request)
    alone = request.strategy in ONE_PROCESS and not request.schedule
    if alone:
        wanted = 1
    elif request.strategy == "pipeline":
        wanted = cells_per_replica(request)
    else:
        replicas = request.replicas and request.replicas * cells_per_replica(request)
        ranks = request.shards if request.strategy in ("tp", "cp", "ep") else replicas
        wanted = ranks or tasks or nodes * (per_node or _ranks_per_node(request, nodes, options))
    if alone and nodes > 1:
        problem = f"{request.strategy} runs in one process and cannot use {nodes} nodes."
        raise UsageError(problem, fix="--nodes 1, or ddp")
    fits = {"ntasks": tasks == wanted, "ntasks-per-node": (per_node or 0) * nodes >= wanted}
    for name, number in given.items():
        if not fits.get(name, True):
            counts = f"{plural(nodes, 'node')} does not match {plural(wanted, 'rank')}"
            problem = f"--slurm {name}={number} on {counts}."
            raise UsageError(problem, fix=f"leave out {name}")
    if wanted < nodes:
        problem = f"{wanted} ranks are not enough for {nodes} nodes."
        raise UsageError(problem, fix=f"--nodes {wanted}, or --replicas {nodes}")
    if request.threads_per_device and "cpus-per-task" not in rest:
        rest["cpus-per-task"] = str(request.threads_per_device)
    return Allocation(nodes, wanted, per_node or -(-wanted // nodes), rest)


def _ranks_per_node(request: Request, nodes: int, options: Options) -> int:
    gpus = gpus_per_node(options, nodes)
    if gpus is None:
        return 1 if nodes > 1 else 2
    each_has_stages = request.strategy == "hybrid" and not has_process_per_cell(request)
    return max(1, gpus // (request.stages or 2)) if each_has_stages else gpus


def gpus_per_node(options: Options, nodes: int) -> int | None:
    """Return 4 for gres=gpu:4, gres=gpu:a100:4, gpus-per-node=a100:4, and gpus=8 on 2 nodes. Return
    None if the job does not request GPUs."""
    gres = [part for part in (options.get("gres") or "").split(",") if re.match("gpu(:|$)", part)]
    asked = [*((part, 1) for part in gres), (options.get("gpus-per-node"), 1)]
    for text, per in [*asked, (options.get("gpus"), nodes)]:
        if text:
            last = text.rpartition(":")[2]  # `a100:4` -> 4, `a100` -> 1
            return max(1, int(last) // per) if last.isdigit() else 1
    return None


def _number(name: str, text: str | None) -> int:
    if text and text.isdigit() and int(text):
        return int(text)
    raise UsageError(f"--slurm {name}={text}: {text!r} is not a positive number.", fix=f"{name}=2")


def limit_seconds(time: str | None) -> int | None:
    """Parse a Slurm time limit: `10` and `10:00` are 10 minutes, `1:00:00` and `0-1` an hour."""
    if not time or not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        return None
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(n * unit for n, unit in zip(parts, units, strict=False))


@dataclass(frozen=True)
class JobScript:
    """Everything that determines a job script. Each start of the job writes to a new folder in
    `runs` and appends its output to a file in `output`."""

    request: Request
    allocation: Allocation
    words: Sequence[str]  # `paralab run` options that are not part of the configuration
    runs: Path
    output: Path
    directory: Path  # the working directory of the command
    paralab: Sequence[str]  # the command that starts paralab
    environment: Mapping[str, str]  # the script sets these, so it also works from another shell
    command: Sequence[str]  # the user's command line, which the script shows as a comment

    def text(self) -> str:
        restart = "${SLURM_RESTART_COUNT:+-restart$SLURM_RESTART_COUNT}"
        lines = [
            "#!/bin/bash",
            f"# {shlex.join(self.command)}",
            "#",
            "# Submit this file as often as you like: sbatch THIS_FILE. Options that you pass to",
            "# sbatch override the lines below. The job's output is in",
            f"# {self.output}/slurm-JOB.out",
            "# Each start writes to its own run folder, which `paralab show FOLDER` reads.",
            "# Both must be on a file system that all nodes share.",
            *(_directive(name, value) for name, value in self._directives().items()),
            "",
            "set -euo pipefail",
            f"cd {shlex.quote(str(self.directory))}",
            *(f"export {name}={shlex.quote(text)}" for name, text in self.environment.items()),
            "",
            "# Slurm may restart the job, for example after a node failure or preemption.",
            f"run={shlex.quote(str(self.runs))}/run-$SLURM_JOB_ID{restart}",
            *self._step(),
        ]
        return "\n".join(lines) + "\n"

    def _directives(self) -> dict[str, str | None]:
        directives: dict[str, str | None] = {
            "job-name": f"paralab-{self.request.strategy}",
            "nodes": str(self.allocation.nodes),
            "ntasks": str(self.allocation.tasks),
            "ntasks-per-node": str(self.allocation.per_node),
            **self.allocation.options,
            "output": str(self.output).replace("%", "%%") + "/slurm-%j.out",
            "open-mode": "append",
        }
        if "requeue" not in directives and "no-requeue" not in directives:
            directives["requeue"] = None
        limit = limit_seconds(directives.get("time"))
        if "signal" not in directives and (limit is None or limit >= SHORTEST_WARNED_SECONDS):
            directives["signal"] = f"USR1@{WARN_SECONDS}"
        return directives

    def _step(self) -> list[str]:
        request = self.request
        # In a step with one task, paralab would start two ranks by default, so ask for one.
        if self.allocation.tasks == 1 and request.strategy not in ONE_PROCESS:
            request = replace(request, replicas=1)
        train = [*self.paralab, "run", request.strategy, *to_words(request), *self.words]
        # Since Slurm 22.05, a step does not inherit the job's --cpus-per-task.
        cpus = "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
        step = f'srun --kill-on-bad-exit=1 {cpus} {shlex.join(train)} --out "$run"'
        if "--checkpoint" not in self.words:
            return [step]
        # Resume if Slurm restarted the job. Requeue it if it saved at its time limit.
        resume = "" if "--resume" in self.words else " ${SLURM_RESTART_COUNT:+--resume}"
        return [
            f"{step}{resume} || code=$?",
            f'if [ "${{code:-0}}" = {Paused.exit_code} ]; then  # stopped by a signal and saved',
            "    scontrol requeue $SLURM_JOB_ID",
            "fi",
            "exit ${code:-0}",
        ]


def run_name(job: int, restarts: int) -> str:
    """Return the name of the folder that the script creates for this start of the job."""
    return f"run-{job}" + (f"-restart{restarts}" if restarts else "")


def _directive(name: str, value: str | None) -> str:
    """Return an #SBATCH line. sbatch splits lines at spaces, so such values need quotes."""
    if value is None:
        return f"#SBATCH --{name}"
    plain = re.fullmatch(r"[\w.,:/@%+=*&|()\[\]-]+", value)
    return f"#SBATCH --{name}={value}" if plain else f'#SBATCH --{name}="{value}"'
