"""Slurm commands: submit, query, and cancel a job. Explain Slurm's answers and suggest fixes.

This needs only `sbatch`, `scontrol`, `sinfo`, and `scancel`. Many clusters have no accounting, so
paralab does not use `sacct`.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from paralab.errors import ParalabError, UsageError

CALL_SECONDS = 60.0  # how long one command may take; the controller may be busy
SHOW_ACCOUNTS = "sacctmgr show assoc user=$USER lists yours"
ENDED = (
    "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY PREEMPTED BOOT_FAIL DEADLINE "
    "REVOKED SPECIAL_EXIT"
).split()


class Waiting(NamedTuple):
    """Why a job has not started (the meaning of Slurm's reason), and the fix."""

    means: str
    do: str

    @property
    def normal(self) -> bool:
        """Whether waiting helps."""
        return self.do.startswith("wait")


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Map the first column to the others. A line that starts with | continues the row above it."""
    lines = re.sub(r"\n +[|]", " |", text).strip().splitlines()
    rows = [line.strip().split(" | ") for line in lines]
    return {name: tuple(columns) for name, *columns in rows}


# The first match counts: Slurm's reason (* matches anything), its meaning, and the fix.
REASONS = _table(f"""
    None | Slurm has not considered it yet | wait
    Resources | it is next in line, once enough nodes are free | wait, or request less
    Priority | other jobs come first | wait, or request less time: a short job fits into gaps
    BeginTime | its start time is later; Slurm delays a requeued job for a while | wait
    Dependency | it is waiting for another job | wait for that job
    Licenses | no license is free | wait
    Prolog | Slurm is preparing the nodes | wait
    Nodes_required_for_job_are_DOWN* | the matching nodes are down, drained, or reserved | wait
    PartitionNodeLimit | it requests more nodes than the partition has or allows per job
        | fewer --nodes, or another partition
    PartitionTimeLimit | it requests more time than the partition allows
        | a shorter time=, or another partition
    PartitionConfig | no node in the partition is large enough
        | fewer ranks, CPUs, or GPUs per node, or more --nodes
    PartitionDown | the partition is disabled | another partition
    PartitionInactive | the partition is disabled | another partition
    BadConstraints | no node meets all constraints | fewer constraints: gres, constraint, mem
    ReqNodeNotAvail* | a required node is down, drained, or reserved, for example for maintenance
        | leave out nodelist=, use a shorter time=, or wait for the node
    Reservation* | its reservation has not begun or has ended | another reservation=
    JobHeldUser | you put it on hold | leave out hold, or run scontrol release JOB
    JobHeldAdmin | an administrator put it on hold | ask the administrators
    DependencyNeverSatisfied | the job it depends on did not end as required | another dependency=
    InvalidAccount | the account does not exist | account=NAME; {SHOW_ACCOUNTS}
    InvalidQOS | the QOS does not exist | qos=NAME; {SHOW_ACCOUNTS}
    AccountNotAllowed | the account may not use this partition | another account= or partition=
    QOSNotAllowed | this partition does not allow the QOS | another qos= or partition=
    QOS*Per[JN]o[bd]* | it requests more than the QOS allows | request less, or another qos=
    QOSMin* | it requests less than the QOS requires per job | request more, or another qos=
    QOS* | your jobs, or all jobs in this QOS, reached its limit | wait for them, or another qos=
    Assoc*PerJob* | it requests more than your account allows | request less, or another account=
    Assoc* | your account's jobs reached its limit | wait for those jobs, or another account=
    launch_failed_requeued_held | a node could not start it, and Slurm put it on hold
        | scontrol release JOB, or ask the administrators
""")

# For jobs that did not complete: the final state, what happened, and the fix.
ENDINGS = _table("""
    CANCELLED | was canceled with scancel or by an administrator | submit it again: {again}
    TIMEOUT | reached its time limit of {limit} | a longer --slurm time=, or fewer --steps
    NODE_FAIL | lost one of its nodes, {nodes}
        | submit it again with --slurm exclude=NODE (sinfo -R names it)
    OUT_OF_MEMORY | used more CPU memory than Slurm allocated
        | more --slurm mem=, a smaller --batch-size, or more ranks
    PREEMPTED | was preempted by a job with higher priority
        | another partition or qos, or submit it again: {again}
    BOOT_FAIL | got a node that did not boot, one of {nodes}
        | submit it again with --slurm exclude=NODE (sinfo -R names it)
    DEADLINE | did not finish before its deadline | leave out deadline=
    FAILED | ended with exit code {code} | read {prints}
""")

# A pattern in sbatch's error for a rejected job, and the fix. Use the first match.
REFUSALS = _table(r"""
    invalid partition|partition name | --slurm partition=NAME: {partitions} (* is the default)
    time limit|--time | --slurm time=MINUTES or time=HOURS:MINUTES:SECONDS, at most TIMELIMIT
    account|qos | --slurm account=NAME,qos=NAME; `sacctmgr show assoc user=$USER` lists yours
    node (configuration|count|name)|CPU count|(memory|feature) spec|generic resource|processors
        | at most what the nodes have (GRES: GPUs, CPUS, MEMORY in MB), e.g. --slurm gres=gpu:N
    unrecognized option|ambiguous | an sbatch long option (sbatch --help)
    contact slurm|configuration|controller|connect
        | use a cluster login node, where `scontrol ping` and `sinfo` answer
    .* | sbatch --help lists the options that --slurm accepts
""")


@dataclass(frozen=True)
class SlurmJob:
    """A job's state, as reported by Slurm."""

    number: int
    state: str
    reason: str = "None"
    nodes: str = ""
    restarts: int = 0
    exit_code: str = "0:0"
    time_limit: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def waiting(self) -> Waiting:
        return explain_reason(self.reason)

    def describe(self) -> str:
        """Return, for example, `PENDING (Resources: it is next, …)` or `RUNNING on n[1-2]`."""
        if self.state == "PENDING" and self.reason != "None":
            return f"PENDING ({self.reason}: {self.waiting.means})"
        return f"{self.state} on {self.nodes}" if self.nodes else self.state


def explain_reason(reason: str) -> Waiting:
    for pattern, meaning in REASONS.items():
        if fnmatchcase(reason, pattern):
            return Waiting(*meaning)
    return Waiting("paralab does not know this reason", "see JOB REASON CODES in `man squeue`")


def require_commands() -> None:
    commands = ("sbatch", "scontrol", "scancel", "sinfo")
    missing = [name for name in commands if not shutil.which(name)]
    if missing:
        problem = f"--slurm needs Slurm, but this machine does not have {', '.join(missing)}."
        raise UsageError(problem, fix="use the cluster's login node, or --dry-run here")


def submit(script: Path, options: Mapping[str, str | None]) -> int:
    """Submit the script and return the job number. Raise a UsageError if Slurm rejects it."""
    done = _call("sbatch", "--parsable", str(script), environment=_environment(options))
    number = done.stdout.strip().splitlines()[-1].partition(";")[0] if done.stdout.strip() else ""
    if done.returncode or not number.isdigit():
        raise explain_refusal(done.stderr or done.stdout, script)
    return int(number)


def _environment(options: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment without variables that override the script or describe an
    outer job."""
    ours = {"SBATCH_" + name.upper().replace("-", "_") for name in options}
    if "SLURM_JOB_ID" in os.environ:
        ours |= {name for name in os.environ if re.match(r"SLURM_(?!CONF$)", name)}
    return {name: value for name, value in os.environ.items() if name not in ours}


def query(number: int) -> SlurmJob | None:
    """Return the job, or None if Slurm forgot it. Raise a ParalabError if Slurm does not answer."""
    done = _call("scontrol", "--oneliner", "show", "job", str(number))
    if done.returncode:
        if "Invalid job id" in done.stderr + done.stdout:
            return None
        raise ParalabError(f"Slurm does not answer: {_message(done.stderr or done.stdout)}")
    return parse_job(number, done.stdout)


def parse_job(number: int, text: str) -> SlurmJob:
    """Parse one line of `scontrol --oneliner show job`."""
    pairs = [word.partition("=")[::2] for word in text.split()]
    fields = dict(reversed(pairs))  # if a name appears twice, the first one counts
    return SlurmJob(
        number,
        fields.get("JobState", "UNKNOWN").partition("+")[0],
        fields.get("Reason", "None"),
        fields.get("NodeList", "").replace("(null)", ""),
        int(fields.get("Restarts", "0")),
        fields.get("ExitCode", "0:0"),
        fields.get("TimeLimit", ""),
    )


def cancel(number: int) -> None:
    _call("scancel", str(number))


def explain_refusal(stderr: str, script: Path | str) -> UsageError:
    """Return sbatch's message with a fix, and with sinfo's table if the fix refers to it."""
    message = _message(stderr)
    fix = next(fix for pattern, [fix] in REFUSALS.items() if re.search(pattern, message, re.I))
    if "{partitions}" in fix:
        names = dict.fromkeys(_call("sinfo", "--noheader", "--format=%P").stdout.split())
        fix = fix.format(partitions=", ".join(names) or "sinfo lists them")
    detail = list_nodes() if "MEMORY" in fix or "TIMELIMIT" in fix else None
    return UsageError(f"Slurm rejected the job: {message} (the script is {script})", fix, detail)


def _message(stderr: str) -> str:
    """Extract the message: `sbatch: error: X` -> `X.`"""
    prefix = r"^\w+: (error: |fatal: )?(Batch job submission failed: )?"
    lines = [re.sub(prefix, "", line).strip() for line in stderr.strip().splitlines()]
    return "; ".join(dict.fromkeys(filter(None, lines))).rstrip(".") + "."


def list_nodes() -> str | None:
    """Return sinfo's table of node resources, or None if sinfo prints nothing."""
    return _call("sinfo", "--format=%9P %.6D %.5c %.8m %20G %.12l %f").stdout.rstrip() or None


def _call(
    *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        problem = f"{words[0]} did not answer within {CALL_SECONDS:g} s"
        return subprocess.CompletedProcess(words, 1, "", problem)
