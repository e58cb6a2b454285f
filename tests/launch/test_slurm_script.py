"""Slurm job scripts and explanations of Slurm's messages: pure functions that do not need Slurm."""

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from paralab.errors import UsageError
from paralab.launch.slurm import (
    ENDINGS,
    REASONS,
    _environment,
    explain_reason,
    explain_refusal,
    parse_job,
)
from paralab.launch.slurm_script import JobScript, allocate, limit_seconds, parse_options, run_name
from paralab.plan.check import check
from paralab.plan.option import to_words
from paralab.plan.request import Request
from tests.conftest import ROOT, run_paralab


def test_options_are_parsed_as_sbatch_names_them():
    assert parse_options('partition=gpu,gres=gpu:4,time=10:00,exclusive,constraint="a,b"') == {
        "partition": "gpu",
        "gres": "gpu:4",
        "time": "10:00",
        "exclusive": None,
        "constraint": "a,b",
    }
    assert parse_options("") == {}
    assert parse_options("--partition=gpu, --time=5") == {"partition": "gpu", "time": "5"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpu", "'gpu' "),
        ("mail-type=BEGIN,END", "'END' "),
        ("p=gpu", "'p' "),
        ("partition=", "partition has no value"),
        ("partition=a,partition=b", "twice"),
        ('constraint="a,b', "key=value"),
        ("output=mine.txt", "--slurm output "),
        ("array=1-4", "--slurm array "),
        ("comment=a\nb", "comment has no value"),
    ],
)
def test_options_that_sbatch_does_not_know_are_refused(text, problem):
    with pytest.raises(UsageError) as caught:
        parse_options(text)
    assert problem in caught.value.problem
    assert caught.value.fix


@pytest.mark.parametrize(
    ("strategy", "nodes", "options", "replicas", "expected"),
    [  #                                                 nodes, ranks, at most per node
        ("ddp", 2, "gres=gpu:4", None, (2, 8, 4)),
        ("ddp", 2, "gres=gpu:a100:4", None, (2, 8, 4)),
        ("ddp", 2, 'gres="shard:1,gpu:2"', None, (2, 4, 2)),
        ("ddp", 2, "gres=gpu", None, (2, 2, 1)),
        ("ddp", 2, "gres=gpu:h100", None, (2, 2, 1)),
        ("ddp", 2, "gpus-per-node=h100:3", None, (2, 6, 3)),
        ("ddp", 2, "gpus=8", None, (2, 8, 4)),
        ("ddp", 2, "gres=gpu:4", 3, (2, 3, 2)),
        ("ddp", 2, "ntasks-per-node=3", None, (2, 6, 3)),
        ("ddp", None, "nodes=2,ntasks=5", None, (2, 5, 3)),
        ("ddp", 3, "", None, (3, 3, 1)),
        ("ddp", None, "", None, (1, 2, 2)),
        ("hybrid", 2, "gres=gpu:4", None, (2, 4, 2)),
        ("pipeline", None, "gres=gpu:4", None, (1, 1, 1)),
    ],
)
def test_how_many_ranks(strategy, nodes, options, replicas, expected):
    asked = allocate(Request(strategy, replicas=replicas), nodes, parse_options(options))
    assert (asked.nodes, asked.tasks, asked.per_node) == expected


@pytest.mark.parametrize(
    ("strategy", "nodes", "options", "replicas", "problem"),
    [
        ("single", 2, "", None, "2 nodes"),
        ("ddp", 3, "", 2, "2 ranks"),
        ("ddp", 2, "ntasks=8", 4, "ntasks=8 "),
        ("ddp", 2, "ntasks-per-node=1", 4, "ntasks-per-node=1 "),
        ("ddp", 2, "nodes=2", None, "nodes=2"),
        ("ddp", 0, "", None, "--nodes 0 "),
        ("ddp", None, "nodes=1-3", None, "'1-3'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_both(strategy, nodes, options, replicas, problem):
    with pytest.raises(UsageError) as caught:
        allocate(Request(strategy, replicas=replicas), nodes, parse_options(options))
    assert problem in caught.value.problem
    assert caught.value.fix


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("1:00:00", 3600),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("0-0:0:5", 5),
        ("soon", None),
        (None, None),
    ],
)
def test_time_limits_as_slurm_writes_them(time, seconds):
    assert limit_seconds(time) == seconds


def text_of(options: str, where: Path, **request) -> str:
    asked = allocate(request := Request("ddp", **request), 2, parse_options(options))
    return JobScript(
        request,
        asked,
        ["--save-weights"],
        where / "the runs",
        where,
        where,
        ["/my python", "paralab"],
        {"A": "b c"},
        ["paralab", "x y"],
    ).text()


def test_the_script_can_be_read(tmp_path):
    text = text_of(
        'partition=gpu,gres=gpu:4,comment="two words"', Path("/home/me"), steps=5, bucket_mb=0.1
    )
    assert text.splitlines()[0] == "#!/bin/bash"
    assert [
        line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")
    ] == [
        "job-name=paralab-ddp",
        "nodes=2",
        "ntasks=8",
        "ntasks-per-node=4",
        "partition=gpu",
        "gres=gpu:4",
        'comment="two words"',
        "output=/home/me/slurm-%j.out",
        "open-mode=append",
        "requeue",
        "signal=USR1@60",
    ]
    assert "cd /home/me\nexport A='b c'\n" in text
    train = "'/my python' paralab run ddp --bucket-mb 0.1 --steps 5 --save-weights"
    assert text.splitlines()[-1].endswith(f'{train} --out "$run"')


def test_a_short_job_is_not_warned_at_its_start():
    assert "--signal" not in text_of("time=2", Path("/x"))
    assert "signal=TERM@5" in text_of("time=2,signal=TERM@5", Path("/x"))
    assert "--requeue" not in text_of("no-requeue", Path("/x"))


@pytest.mark.processes
def test_the_script_trains_into_a_new_folder_at_every_start(tmp_path):
    """Run the script in bash with a fake srun, as Slurm does at the first start and after a requeue."""
    stand_in = tmp_path / "srun"
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "job").write_text(text_of("cpus-per-task=3", tmp_path))
    names = []
    for start in ({}, {"SLURM_RESTART_COUNT": "2", "SLURM_CPUS_PER_TASK": "3"}):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", **start}
        done = subprocess.run(
            ["bash", str(tmp_path / "job")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        words = done.stdout.splitlines()
        assert words[0] == "--kill-on-bad-exit=1"
        assert ("--cpus-per-task=3" in words) == bool(start)
        names.append(words[-1])
    assert names == [f"{tmp_path}/the runs/{run_name(42, restarts)}" for restarts in (0, 2)]


def test_a_request_survives_the_script():
    """The job gets exactly the requested numbers, to the last digit."""
    request = Request(
        "ddp",
        precision="fp16",
        loss_scale=1234567.0,
        bucket_mb=0.1,
        steps=3,
        seed=7,
        static_graph=True,
    )
    words = to_words(request)
    assert words[words.index("--loss-scale") + 1] == "1234567.0"
    assert words[words.index("--bucket-mb") + 1] == "0.1"
    assert "--static-graph" in words
    assert words[words.index("--steps") + 1] == "3"
    check(request)


def test_slurms_reasons_have_an_explanation_and_a_fix():
    assert explain_reason("Resources").normal
    assert not explain_reason("ReqNodeNotAvail,_UnavailableNodes:n2").normal
    assert not explain_reason("QOSMaxCpuPerJobLimit").normal
    assert explain_reason("QOSMaxJobsPerUserLimit").normal
    assert not explain_reason("AssocMaxWallDurationPerJobLimit").normal
    assert explain_reason("AssocGrpGRES").normal
    assert "squeue" in explain_reason("Moonphase").do
    assert not explain_reason("Moonphase").normal
    page = (ROOT / "docs" / "slurm.md").read_text()
    assert [word for word in REASONS if f"`{word}`" not in page] == []
    assert [state for state in ENDINGS if f"`{state}`" not in page] == []


def test_a_job_is_read_from_scontrol():
    line = (
        "JobId=7 JobName=x UserId=root(0) JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:n2 Requeue=1 Restarts=1 "
        "ExitCode=0:0 RunTime=00:00:00 TimeLimit=00:02:00 ReqNodeList=n2 NodeList=(null) Comment=JobState=RUNNING"
    )
    job = parse_job(7, line)
    assert (job.state, job.restarts, job.nodes, job.time_limit, job.ended) == (
        "PENDING",
        1,
        "",
        "00:02:00",
        False,
    )
    assert job.describe().startswith("PENDING (ReqNodeNotAvail,_UnavailableNodes:n2: ")
    assert parse_job(7, line.replace("PENDING", "CANCELLED")).ended


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "time=",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "account=NAME",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "qos=NAME"),
        (
            "sbatch: unrecognized option '--partitoin=x'\nTry \"sbatch --help\" for more information",
            "sbatch",
        ),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            "scontrol ping",
        ),
        ("sbatch: error: the moon is full", "sbatch --help"),
    ],
)
def test_refusals_quote_slurm_and_have_a_fix(said, fix, monkeypatch):
    monkeypatch.setattr("paralab.launch.slurm.list_nodes", lambda: None)
    error = explain_refusal(said, "job.sbatch")
    assert said.splitlines()[0].rpartition(": ")[2] in error.problem
    assert "sbatch: error" not in error.problem
    assert "job.sbatch" in error.problem
    assert fix in str(error.fix)


def test_a_variable_does_not_override_the_command(monkeypatch):
    """sbatch prefers SBATCH_PARTITION to the option in the script."""
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SLURM_CONF", "SLURM_MEM_PER_CPU"):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    left = _environment({"partition": "gpu"})
    assert "SBATCH_PARTITION" not in left
    assert {"SBATCH_ACCOUNT", "SLURM_MEM_PER_CPU"} <= left.keys()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert {"SLURM_CONF"} == {name for name in _environment({}) if name.startswith("SLURM_")}


@pytest.mark.processes
def test_without_slurm_the_command_says_so_and_still_prints_the_script(tmp_path):
    nowhere = {"PATH": str(tmp_path)}
    refused = run_paralab(
        "run", "ddp", "--slurm", "partition=gpu", cwd=tmp_path, environment=nowhere
    )
    assert refused.code == 2
    assert "sbatch" in refused.err
    assert "--dry-run" in refused.err
    assert list(tmp_path.iterdir()) == []
    shown = run_paralab(
        "run", "ddp", "--slurm", "partition=gpu", "--dry-run", cwd=tmp_path, environment=nowhere
    )
    assert shown.code == 0
    assert shown.out.startswith("#!/bin/bash\n# paralab run ddp --slurm partition=gpu --dry-run\n")
    assert list(tmp_path.iterdir()) == []
    wrong = run_paralab("run", "ddp", "--nodes", "2", cwd=tmp_path)
    assert (wrong.code, "--nodes " in wrong.err) == (2, True)


def test_each_stage_and_shard_of_a_replica_is_a_task():
    grid = Request("hybrid", replicas=2, stages=2, shards=2)
    assert allocate(grid, 2, {}).tasks == 8
    assert allocate(replace(grid, stages=1), 2, {}).tasks == 4
    # One rank per GPU, and not one per two GPUs as without shards.
    assert allocate(replace(grid, replicas=None), 2, parse_options("gres=gpu:4")).tasks == 8
