"""The script of a Slurm job, as text: from `--nodes 2 --slurm partition=gpu,gres=gpu:4,time=10:00`
to what `sbatch` reads.

Pure functions. The script is for people too: it can be kept, changed, and submitted by hand as
often as one likes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paralab.errors import Paused, UsageError
from paralab.plan.option import to_words
from paralab.plan.request import Request

Options = Mapping[str, str | None]  # sbatch's long options without their dashes; None for a flag

ONE_PROCESS = (
    "single",
    "dp",
    "mp",
    "pipeline",
)  # these strategies are one process, on one node, unless they have a --schedule
WARN_SECONDS = 60  # before the time limit the ranks get SIGUSR1 …
SHORTEST_WARNED_SECONDS = (
    300  # … but not in a job that is hardly longer than that: Slurm would send it at the start
)

FLAGS = (
    *(
        "contiguous",
        "exclusive",
        "hold",
        "no-kill",
        "no-requeue",
        "overcommit",
        "oversubscribe",
        "reboot",
        "requeue",
    ),
    *("spread-job", "use-min-nodes"),
)
OURS = {
    "output": "paralab reads what the job prints from slurm-JOB.out in the run folder",
    "error": "paralab reads what the job prints from slurm-JOB.out in the run folder",
    "open-mode": "a requeued job goes on writing where it was",
    "chdir": "the job works in the folder in which the command was given",
    "wrap": "paralab writes the script",
    "array": "one command is one training",
    "clusters": "paralab follows the job in the cluster that sbatch speaks to by itself",
    "test-only": "--dry-run prints the script",
    "wait": "paralab waits for the job anyway",
    "parsable": "paralab reads what sbatch prints itself",
}

_PART = re.compile(
    r"""\s*(?P<name>[^=,"']+?)\s*                      # a name …
        (?:=(?P<value>"[^"]*"|'[^']*'|[^,"']*))?       # … and its value, in quotes if there are commas in it
        (?:,|$)""",
    re.VERBOSE,
)


def parse(text: str) -> dict[str, str | None]:
    """`partition=gpu,constraint="a,b",exclusive` -> {"partition": "gpu", "constraint": "a,b",
    "exclusive": None}."""
    options: dict[str, str | None] = {}
    position = 0
    while position < len(text):
        found = _PART.match(text, position)
        if not found:
            raise UsageError(
                f"--slurm {text!r}: {text[position:]!r} is no key=value.",
                fix="--slurm partition=NAME,time=10:00",
            )
        name, value = found["name"].removeprefix("--"), found["value"]
        _check_option(text, name, value)
        if name in options:
            raise UsageError(
                f"--slurm {text!r}: {name} is there twice.",
                fix=f"one {name}; a value with commas is quoted",
            )
        options[name] = None if value is None else value.strip("\"'")
        position = found.end()
    return options


def _check_option(text: str, name: str, value: str | None) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        raise UsageError(
            f"--slurm {text!r}: {name!r} is no long option of sbatch.",
            fix="sbatch's long names: partition=, gres=, time=, …",
        )
    if value is None and name not in FLAGS:
        raise UsageError(
            f"--slurm {text!r}: {name!r} has no value, and is no flag of sbatch.",
            fix=f'{name}=VALUE; a value with commas is quoted: constraint="a,b". Flags: {", ".join(FLAGS)}',
        )
    if value is not None and (not value.strip("\"'") or not value.isprintable()):
        raise UsageError(
            f"--slurm {text!r}: {name} has no value.", fix=f"{name}=VALUE, or leave it out"
        )
    if name in OURS:
        raise UsageError(f"--slurm {name} cannot be chosen: {OURS[name]}.", fix=f"leave {name} out")


@dataclass(frozen=True)
class Allocation:
    """What the job asks Slurm for: so many tasks, each of them a rank, at most `per_node` on a
    node."""

    nodes: int
    tasks: int
    per_node: int
    options: Options  # all others


def allocation(request: Request, nodes: int | None, options: Options) -> Allocation:
    """A rank per replica, if their number was given; else one per task or per GPU; else one per
    node, on one node two.

    2 nodes, gres=gpu:4           8 ranks, 4 per node
    2 nodes, gres=gpu:4, hybrid   4 ranks, each with a GPU for each of its 2 stages
    2 nodes, --replicas 3         3 ranks, at most 2 per node
    2 nodes, ntasks-per-node=2    4 ranks
    2 nodes                       2 ranks
    """
    rest = dict(options)
    if nodes is not None and "nodes" in rest:
        raise UsageError(
            f"--nodes {nodes} and --slurm nodes={rest['nodes']} say the same thing twice.",
            fix="--nodes alone",
        )
    nodes = (
        _number("nodes", rest.pop("nodes")) if "nodes" in rest else 1 if nodes is None else nodes
    )
    if nodes < 1:
        raise UsageError(f"--nodes {nodes} is not a positive number.", fix="--nodes 1 or more")
    tasks = _number("ntasks", rest.pop("ntasks")) if "ntasks" in rest else None
    per_node = (
        _number("ntasks-per-node", rest.pop("ntasks-per-node"))
        if "ntasks-per-node" in rest
        else None
    )
    alone = request.strategy in ONE_PROCESS and not request.schedule
    per_replica = (request.stages or 2) if request.schedule else 1
    if alone:
        wanted = 1
    elif request.strategy == "pipeline":
        wanted = per_replica
    else:
        replicas = request.replicas and request.replicas * per_replica
        wanted = replicas or tasks or nodes * (per_node or _ranks_per_node(request, nodes, options))
    if alone and nodes > 1:
        raise UsageError(
            f"{request.strategy} is one process, and cannot use {nodes} nodes.",
            fix="--nodes 1, or ddp",
        )
    for name, given, fits in (
        ("ntasks", tasks, tasks == wanted),
        ("ntasks-per-node", per_node, (per_node or 0) * nodes >= wanted),
    ):
        if given is not None and not fits:
            raise UsageError(
                f"--slurm {name}={given} on {nodes} nodes, but there are {wanted} ranks.",
                fix=f"leave {name} out",
            )
    if wanted < nodes:
        raise UsageError(
            f"{wanted} ranks cannot use {nodes} nodes.",
            fix=f"--nodes {wanted}, or --replicas {nodes}",
        )
    if request.threads_per_device and "cpus-per-task" not in rest:
        rest["cpus-per-task"] = str(request.threads_per_device)
    return Allocation(nodes, wanted, per_node or -(-wanted // nodes), rest)


def _ranks_per_node(request: Request, nodes: int, options: Options) -> int:
    gpus = gpus_per_node(options, nodes)
    if gpus is None:
        return 1 if nodes > 1 else 2
    return (
        max(1, gpus // (request.stages or 2))
        if request.strategy == "hybrid" and not request.schedule
        else gpus
    )


def gpus_per_node(options: Options, nodes: int) -> int | None:
    """gres=gpu:4, gres=gpu:a100:4, gpus-per-node=a100:4, gpus=8 of 2 nodes: 4. None where no GPU is
    asked for."""
    for part in (options.get("gres") or "").split(","):
        if part.split(":")[0] == "gpu":
            return _count(part)
    for name, per in (("gpus-per-node", 1), ("gpus", nodes)):
        if options.get(name):
            return max(1, _count(str(options[name])) // per)
    return None


def _count(text: str) -> int:
    """`a100:4` -> 4, `a100` -> 1."""
    last = text.rpartition(":")[2]
    return int(last) if last.isdigit() else 1


def _number(name: str, text: str | None) -> int:
    if not (text or "").isdigit() or int(text or 0) < 1:
        raise UsageError(
            f"--slurm {name}={text}: {text!r} is not a positive number.", fix=f"{name}=2"
        )
    return int(text or 0)


def limit_seconds(time: str | None) -> int | None:
    """Slurm's ways to write a time limit: `10` and `10:00` are ten minutes, `1:00:00` an hour,
    `1-12` a day and a half."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time or "")
    if not found:
        return None
    days, *rest = (None if group is None else int(group) for group in found.groups())
    first, second, third = rest[0] or 0, rest[1] or 0, rest[2] or 0
    if days is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    return first * 60 + second if rest[2] is None else (first * 60 + second) * 60 + third


def script(
    request: Request,
    asked: Allocation,
    extras: Sequence[str],
    runs: Path,
    prints: Path,
    where: Path,
    paralab: Sequence[str],
    environment: Mapping[str, str],
    command: Sequence[str],
    saves: bool = False,
) -> str:
    """The text. Every start of the job trains into a new folder below `runs`; what it prints is
    appended to a file in `prints`.

    extras       options of `paralab run` that are no part of the request, such as --save-weights
    where        the folder in which the command was given
    paralab      the words that start it
    environment  what must be set for it to run by hand, from another shell
    command      what the user wrote, for the comment
    saves        it makes checkpoints: a start after the first goes on with the last one, and a job that was told to stop (its time
                 is up) and has saved is put into the queue again
    """
    known: dict[str, str | None] = {
        "job-name": f"paralab-{request.strategy}",
        "nodes": str(asked.nodes),
        "ntasks": str(asked.tasks),
        "ntasks-per-node": str(asked.per_node),
        **asked.options,
        "output": str(prints).replace("%", "%%") + "/slurm-%j.out",
        "open-mode": "append",
    }
    if "requeue" not in known and "no-requeue" not in known:
        known["requeue"] = None
    limit = limit_seconds(known.get("time"))
    if "signal" not in known and (limit is None or limit >= SHORTEST_WARNED_SECONDS):
        known["signal"] = f"USR1@{WARN_SECONDS}"
    if (
        asked.tasks == 1 and request.strategy not in ONE_PROCESS
    ):  # a step of one task is not joined: paralab would start two ranks
        request = replace(request, replicas=1)
    train = [*paralab, "run", request.strategy, *to_words(request), *extras]
    # Since Slurm 22.05 a step does not inherit the job's --cpus-per-task.
    step = "srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {shlex.join(command)}",
            "#",
            "# By hand, as often as you like: sbatch THIS_FILE. What is given to sbatch there wins over the lines below.",
            f"# What it prints is in {prints}/slurm-JOB.out; every start trains into a folder of its own, which",
            "# `paralab show FOLDER` reads. Both must be on a file system that the nodes share.",
            *(_directive(name, value) for name, value in known.items()),
            "",
            "set -euo pipefail",
            f"cd {shlex.quote(str(where))}",
            *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
            "",
            "# Slurm may start the job again (a node failed, another job had priority): nothing is overwritten then.",
            f"run={shlex.quote(str(runs))}/run-$SLURM_JOB_ID${{SLURM_RESTART_COUNT:+-restart$SLURM_RESTART_COUNT}}",
            *_step(f'{step} {shlex.join(train)} --out "$run"', saves, "--resume" in extras),
            "",
        ]
    )


def _step(train: str, saves: bool, resumes: bool) -> list[str]:
    if not saves:
        return [train]
    return [
        train + ("" if resumes else " ${SLURM_RESTART_COUNT:+--resume}") + " || code=$?",
        f'if [ "${{code:-0}}" = {Paused.exit_code} ]; then  # stopped by a signal, and saved: the rest when there is time again',
        "    scontrol requeue $SLURM_JOB_ID",
        "fi",
        "exit ${code:-0}",
    ]


def run_name(job: int, restarts: int) -> str:
    """What the script calls the folder of a start."""
    return f"run-{job}" + (f"-restart{restarts}" if restarts else "")


def _directive(name: str, value: str | None) -> str:
    """sbatch splits a line at blanks, and knows quotes."""
    if value is None:
        return f"#SBATCH --{name}"
    plain = re.fullmatch(r"[\w.,:/@%+=*&|()\[\]-]+", value)
    return f"#SBATCH --{name}={value}" if plain else f'#SBATCH --{name}="{value}"'
