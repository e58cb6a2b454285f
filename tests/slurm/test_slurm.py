"""paralab with a real Slurm: two nodes on this host. With PARALAB_REQUIRE_SLURM=1, a missing Slurm
is a failure. Most jobs do not train. A fake `srun` sleeps, fails, or leaves a recorded run, so the
tests can wait for Slurm without torch. Slow jobs (the time limit, a requeue) start first and are
checked last.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paralab.record.checkpoints import checkpoints
from tests.conftest import DEADLINE_SECONDS, ROOT, Finished, run_paralab
from tests.launch.test_endings import wait_for_steps
from tests.slurm.cluster import cluster, idle, why_not

pytestmark = pytest.mark.processes

TRAINING = ("--workload", "mlp:tiny", "--steps", "4")
ERROR = {
    "event": "error",
    "time": 9,
    "error": "ValueError: a label that is no class",
    "detail": "line 7",
}
STAND_IN = """#!/bin/sh
for run in "$@"; do :; done  # the last word: --out RUN
case "$STAND_IN" in
  sleep) exec sleep 100 ;;
  fail)  cp -r "$RECORDED" "$run"; cat "$RECORDED/error" >> "$run/events/rank0.jsonl"; exit 3 ;;
  print) echo "the disk is full"; exit 3 ;;
  twice) [ -n "$SLURM_RESTART_COUNT" ] || exec sleep 100; cp -r "$RECORDED" "$run" ;;
  *)     exec SRUN "$@" ;;
esac
"""


class Cluster:
    """Run Slurm commands, as in a shell."""

    def __init__(self, environment, folder, recorded):
        self.environment = {
            **environment,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "RECORDED": str(recorded),
        }
        self.folder = folder
        (recorded / "error").write_text(json.dumps(ERROR) + "\n")
        (folder / "srun").write_text(STAND_IN.replace("SRUN", str(shutil.which("srun"))))
        (folder / "srun").chmod(0o755)

    def paralab(self, *arguments, cwd, act="", seconds=DEADLINE_SECONDS) -> Finished:
        return run_paralab(
            *arguments, cwd=cwd, environment={**self.environment, "STAND_IN": act}, seconds=seconds
        )

    def start(self, name, act, *options) -> "Followed":
        """Run `paralab run ddp --slurm` in a separate folder, while the test does something to its
        job."""
        folder = self.folder / name
        folder.mkdir()
        command = [
            sys.executable,
            "-m",
            "paralab",
            "run",
            "ddp",
            "--slurm",
            "time=10,ntasks=1",
            "--out",
            "out",
            *options,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment, "STAND_IN": act}
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            return Followed(
                self,
                folder,
                subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err),
            )

    def run(self, *command, cwd=None) -> str:
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            command,
            env=environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


class Followed:
    def __init__(self, cluster, folder, process):
        self.cluster, self.folder, self.process = cluster, folder, process

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def job(self) -> str:
        return re.search(r"Slurm job (\d+)", self.err)[1]

    def wait_for(self, words) -> "Followed":
        deadline = time.monotonic() + DEADLINE_SECONDS
        while words not in self.err:
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.05)
        return self

    def end(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Train the same on one device without Slurm. The fake `srun` leaves this recording."""
    folder = tmp_path_factory.mktemp("local")
    return run_paralab(
        "run", "single", *TRAINING, "--out", str(folder / "run"), "--json", cwd=folder
    ).json


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, request):
    if reason := why_not():
        (pytest.fail if os.environ.get("PARALAB_REQUIRE_SLURM") == "1" else pytest.skip)(reason)
    recorded = Path(request.getfixturevalue("local")["run_folder"])  # only now: it takes a while
    with cluster() as environment:
        yield Cluster(environment, tmp_path_factory.mktemp("slurm"), recorded)


@pytest.fixture(scope="module", autouse=True)
def slow_ones(slurm):
    """Slurm checks time limits twice a minute."""
    timed = slurm.start("timed", "sleep").wait_for("RUNNING")
    twice = slurm.start("twice", "twice").wait_for("RUNNING")
    slurm.run("scontrol", "update", f"jobid={timed.job}", "EndTime=now+2seconds")
    slurm.run("scontrol", "requeue", twice.job)
    twice.wait_for("PENDING (BeginTime")
    slurm.run(
        "scontrol", "update", f"jobid={twice.job}", "StartTime=now"
    )  # Slurm would delay it for two minutes
    yield timed, twice
    for followed in (timed, twice):
        if followed.process.poll() is None:
            followed.process.kill()
            followed.process.wait()


def test_a_job_brings_the_result_back(slurm, local, tmp_path):
    """Two ranks on two nodes have the same losses as one device here."""
    done = slurm.paralab(
        "run",
        "ddp",
        *TRAINING,
        "--nodes",
        "2",
        "--slurm",
        "gres=gpu:1,time=10:00",
        "--out",
        "out",
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    for words in ("out/job.sbatch", "RUNNING on n[1-2]", "step 4/4", "COMPLETED on n[1-2]"):
        assert words in done.err
    assert "32 = 2 ranks × 16 samples" in done.out
    [run] = (tmp_path / "out").glob("run-*")
    assert f"run folder       out/{run.name}" in done.out
    result = json.loads((run / "result.json").read_text())
    assert result["losses"] == pytest.approx(local["losses"], rel=1e-5)
    assert [rank["node"] for rank in result["ranks"]] == ["n1", "n2"]
    assert "gres=gpu:1" in (tmp_path / "out" / "job.sbatch").read_text()
    shown = slurm.paralab("show", "out", cwd=tmp_path)
    assert "ddp ×2" in shown.out, shown.err


def test_the_printed_script_is_for_sbatch_by_hand(slurm, local, tmp_path):
    """Submit from another folder. Slurm's signal before the time limit must not end the ranks."""
    (tmp_path / "here").mkdir()
    steps = ("--workload", "mlp:tiny", "--steps", "300")
    printed = slurm.paralab(
        "run",
        "ddp",
        *steps,
        "--replicas",
        "2",
        "--slurm",
        "time=10",
        "--dry-run",
        cwd=tmp_path / "here",
    )
    (tmp_path / "job").write_text(printed.out)
    assert list((tmp_path / "here").iterdir()) == []
    number = slurm.run("sbatch", "--parsable", "job", cwd=tmp_path)
    run = tmp_path / "here" / "runs" / "slurm" / f"run-{number}"
    events = run / "events" / "rank1.jsonl"
    deadline = time.monotonic() + DEADLINE_SECONDS
    signalled = False
    while not (run / "result.json").exists():
        assert time.monotonic() < deadline, "the job did not end"
        if not signalled and events.exists() and '"step"' in events.read_text():
            slurm.run("scancel", "--signal=USR1", number)
            signalled = True
        time.sleep(0.1)
    assert signalled
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("completed", 300)
    assert result["losses"][:4] == pytest.approx(local["losses"], rel=1e-5)
    assert "samples/s" in (tmp_path / "here" / f"slurm-{number}.out").read_text()


def test_a_partition_that_is_not_there(slurm, tmp_path):
    done = slurm.paralab("run", "ddp", "--slurm", "partition=gpu", "--json", cwd=tmp_path)
    assert done.code == 2
    error = json.loads(done.out)
    assert "Invalid partition name specified" in error["error"]
    assert "debug*, short" in error["fix"]
    [script] = tmp_path.glob("runs/*/job.sbatch")
    assert str(script) in error["error"]


def test_more_gpus_than_a_node_has(slurm, tmp_path):
    done = slurm.paralab("run", "ddp", "--slurm", "gres=gpu:3", cwd=tmp_path)
    assert done.code == 2
    assert "Requested node configuration is not available" in done.err
    assert "gpu:2" in done.err  # the table of what the nodes have
    assert "--slurm gres=gpu:N" in done.err


def test_a_job_that_can_never_start(slurm, tmp_path):
    done = slurm.paralab(
        "run", "ddp", "--nodes", "3", "--slurm", "", "--slurm-wait", "2", cwd=tmp_path
    )
    assert done.code == 1
    assert "PENDING (PartitionNodeLimit)" in done.err
    assert "Try: fewer --nodes" in done.err


def test_a_job_whose_node_is_drained(slurm, tmp_path):
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    try:
        done = slurm.paralab(
            "run", "ddp", "--slurm", "nodelist=n2", "--slurm-wait", "2", cwd=tmp_path
        )
    finally:
        slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    assert done.code == 1
    assert "PENDING (ReqNodeNotAvail,_UnavailableNodes:n2)" in done.err
    assert "drained" in done.err
    assert "nodelist=" in done.err
    number = re.search(r"Slurm job (\d+)", done.err)[1]
    assert "JobState=CANCELLED" in slurm.run("scontrol", "show", "job", number)


def test_a_job_that_somebody_cancels(slurm):
    followed = slurm.start("cancelled", "sleep").wait_for("RUNNING")
    slurm.run("scancel", followed.job)
    assert followed.end() == 1
    assert "(CANCELLED)" in followed.err
    assert "sbatch out/job.sbatch" in followed.err


def test_scancel_of_a_job_with_checkpoints_saves_the_last_step(slurm, tmp_path):
    """Slurm signals every process in the job at once, and kills those that remain after KillWait
    (3 s here)."""
    run = f"{sys.executable} -m paralab run ddp --replicas 2 --workload mlp:tiny --steps 100000 --checkpoint kept --out run"
    (tmp_path / "job").write_text(f"#!/bin/bash\nexport PYTHONPATH={ROOT}\nsrun -n1 {run}\n")
    number = slurm.run("sbatch", "--parsable", "-n1", "job", cwd=tmp_path)
    wait_for_steps(tmp_path, 20)
    slurm.run("scancel", number)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (tmp_path / "run" / "result.json").exists():
        assert time.monotonic() < deadline, (tmp_path / f"slurm-{number}.out").read_text()
        time.sleep(0.1)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "stopped"
    assert [(each.step, each.problem) for each in checkpoints(tmp_path / "kept", check=True)] == [
        (result["reached_step"], None)
    ]


def test_ctrl_c_cancels_the_job(slurm):
    followed = slurm.start("interrupted", "sleep").wait_for("RUNNING")
    followed.process.send_signal(signal.SIGINT)
    assert followed.end() == 130
    assert f"scancel {followed.job}" in followed.err
    assert "job.sbatch" in followed.err
    assert "JobState=CANCELLED" in slurm.run("scontrol", "show", "job", followed.job)


def test_a_closed_ssh_session_leaves_the_job_alone(slurm):
    followed = slurm.start("hung up", "sleep").wait_for("RUNNING")
    followed.process.send_signal(signal.SIGHUP)
    assert followed.end() == 129
    assert "JobState=RUNNING" in slurm.run("scontrol", "show", "job", followed.job)
    slurm.run("scancel", followed.job)


def test_a_failed_job_shows_the_rank_that_failed_first(slurm):
    followed = slurm.start("failed", "fail")
    assert followed.end() == 1
    assert "code 3 (FAILED, NonZeroExitCode)" in followed.err
    assert f"{ERROR['error']}\n{ERROR['detail']}" in followed.err


def test_a_job_that_failed_before_its_ranks_shows_what_it_printed(slurm):
    followed = slurm.start("printed", "print", "--json")
    assert followed.end() == 1
    error = json.loads((followed.folder / "stdout").read_text())
    assert error["detail"] == "the disk is full"
    assert error["fix"] == f"read out/slurm-{followed.job}.out"


def test_a_job_that_slurm_starts_again(slow_ones):
    """The second start gets its own folder, and the first folder is kept."""
    _, twice = slow_ones
    assert twice.end() == 0, twice.err
    assert "PENDING (BeginTime" in twice.err
    assert "(restart 1)" in twice.err
    assert f"out/run-{twice.job}-restart1" in (twice.folder / "stdout").read_text()


def test_a_job_that_reaches_its_time_limit(slow_ones):
    timed, _ = slow_ones
    assert timed.end() == 1
    assert "00:0" in timed.err  # the limit
    assert "(TIMEOUT, TimeLimit)" in timed.err
    assert "DUE TO TIME LIMIT" in timed.err  # the last lines that the job printed
    assert "--slurm time=" in timed.err


def test_the_cluster_is_idle_again(slurm):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while idle(slurm.environment) < 2:
        assert time.monotonic() < deadline, slurm.run("squeue")
        time.sleep(0.2)
