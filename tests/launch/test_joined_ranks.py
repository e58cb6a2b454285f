"""`paralab run` under torchrun and srun: the launched processes become the ranks of one run, with
one folder and one clock."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from bench.faults.inside import plant
from bench.link import link, why_not
from paralab.analyse.recording import Recording
from paralab.errors import UsageError
from paralab.launch.launched_by import assign_places, detect_launcher, without_launch
from paralab.launch.processes import INSIDE
from paralab.plan.grid import Place, grid
from paralab.plan.request import prefix_words
from paralab.record.checkpoints import checkpoints
from paralab.record.events import Start
from paralab.worker.measure.clock import QUESTIONS, best_offset
from tests import forked
from tests.conftest import DEADLINE_SECONDS, ROOT, Finished, run_paralab
from tests.launch.test_endings import SLOW, wait_for_steps

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n1",
}
TORCHRUN |= {
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SBATCH = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
}
SRUN = {
    **SBATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
}
SRUN |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    #                                          launcher    rank of  local node served attempt
    [
        ({}, None),
        (SBATCH, None),  # a job script is not a task in a step: it may start its own ranks
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun -n 1 paralab run ddp --replicas 2
        ({**TORCHRUN, INSIDE: "rank 3"}, None),  # a rank that paralab has started
        (TORCHRUN, ("torchrun", 3, 4, 1, 1, False, "abc/2")),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ("torchrun", 3, 4, 1, 1, True, "abc/2"),
        ),
        (
            {**SRUN, **TORCHRUN},
            ("torchrun", 3, 4, 1, 1, False, "abc/2"),
        ),  # srun torchrun: the inner launcher counts
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            ("the launcher that set RANK and WORLD_SIZE", 0, 1, None, None, False, "none/0"),
        ),
        (SRUN, ("srun", 3, 4, 1, 1, False, "7-0")),
        (
            {**SRUN, "SLURM_RESTART_COUNT": "1"},
            ("srun", 3, 4, 1, 1, False, "7-0-1"),
        ),  # requeued: the same job and step again
    ],
)
def test_the_environment_identifies_the_launcher(environment, expected):
    it = detect_launcher(environment)
    told = it and (
        it.launcher,
        it.rank,
        it.world_size,
        it.local_rank,
        it.node,
        it.served,
        it.attempt,
    )
    assert told == expected


def test_an_impossible_environment_is_refused():
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT"):
        detect_launcher({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="WORLD_SIZE='two'"):
        detect_launcher({"RANK": "0", "WORLD_SIZE": "two"})


def test_an_inspecting_process_is_not_a_rank():
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_ID": "7"}
    assert detect_launcher(without_launch({**TORCHRUN, **SRUN, **kept})) is None
    assert kept.items() <= without_launch({**TORCHRUN, **SRUN, **kept}).items()


def fact(rank, node, name, mask, machine="A", local_rank=None):
    return {
        "rank": rank,
        "node": node,
        "name": name,
        "machine": machine,
        "local_rank": local_rank,
        "gpus": [],
        "cores": 8,
        "mask": mask,
    }


def test_ranks_share_cores_unless_each_has_its_own():
    def cores(facts):
        return [(place.node, place.local_rank, place.cores) for place in assign_places(facts)]

    shared, first, second = list(range(8)), [0, 1, 2, 3], [4, 5, 6, 7]
    assert cores([fact(0, 0, "a", shared), fact(1, 0, "a", shared)]) == [("a", 0, 4), ("a", 1, 4)]
    assert cores([fact(0, 0, "a", first), fact(1, 0, "a", second)]) == [("a", 0, 8), ("a", 1, 8)]
    assert cores([fact(0, 0, "a", shared), fact(1, 1, "b", shared, "B")]) == [
        ("a", 0, 8),
        ("b", 0, 8),
    ]
    # Two nodes in a test cluster are one machine, so they share its cores.
    assert cores([fact(0, 0, "vm", shared), fact(1, 1, "vm", shared)]) == [
        ("vm#0", 0, 4),
        ("vm#1", 0, 4),
    ]


@pytest.mark.parametrize(
    (
        "seen",
        "devices",
    ),  # for four ranks on two nodes: the GPUs that each sees -> our device name = torch's index
    [
        (
            [("n1", "AB"), ("n1", "AB"), ("n2", "CD"), ("n2", "CD")],
            ["n1/cuda:0=0", "n1/cuda:1=1", "n2/cuda:0=0", "n2/cuda:1=1"],
        ),
        (
            [("n1", "A"), ("n1", "B"), ("n2", "C"), ("n2", "D")],
            ["n1/cuda:0=0", "n1/cuda:1=0", "n2/cuda:0=0", "n2/cuda:1=0"],
        ),
        (
            [("n1", "AB"), ("n1", "AB"), ("n1", "AB"), ("n1", "AB")],
            ["cuda:0=0 s", "cuda:1=1 s", "cuda:0=0 s", "cuda:1=1 s"],
        ),
        (
            [("n1", "A"), ("n1", "B"), ("n2", "A"), ("n2", "B")],
            ["n1/cuda:0=0 s", "n1/cuda:1=0 s", "n1/cuda:0=0 s", "n1/cuda:1=0 s"],
        ),
    ],
)
def test_a_rank_uses_the_gpu_that_is_its_own(seen, devices):
    where = [Place(node, rank, tuple(gpus), 1) for rank, (node, gpus) in enumerate(seen)]
    cells = grid("ddp", 4, 1, "spread", len(seen[0][1]), places=where)
    found = [f"{cell.name}={cell.torch[-1]}{' s' if cell.shared else ''}" for [cell] in cells]
    assert found == devices


def test_the_fastest_answer_gives_the_clock_offset():
    slow, quick = (10.0, 510.9, 11.0), (20.000, 520.020, 20.004)
    found = best_offset([slow, quick, slow])
    assert found.seconds == pytest.approx(500.018)
    assert found.uncertainty == pytest.approx(0.002)


@contextmanager
def launched(*command, cwd, environment=None):
    """Start torchrun in its own process group; end the group if the test fails."""
    clean = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    process = subprocess.Popen(command, cwd=cwd, env=clean, **pipes)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=DEADLINE_SECONDS)


def words(*arguments, rendezvous=("--standalone", "--nproc_per_node=2"), python=(sys.executable,)):
    return [*python, "-m", "torch.distributed.run", *rendezvous, "-m", "paralab", *arguments]


def torchrun(*arguments, cwd, environment=None, python=(sys.executable,)):
    with launched(*words(*arguments, python=python), cwd=cwd, environment=environment) as process:
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
    return Finished(subprocess.CompletedProcess(process.args, process.returncode, out, err))


@pytest.mark.processes
def test_torchrun_is_the_same_training_in_one_folder(tmp_path):
    arguments = (
        "run",
        "ddp",
        "--steps",
        "4",
        "--threads-per-device",
        "1",
        "--json",
        "--workload",
        "cnn:tiny",
    )
    joint = torchrun(
        *arguments, "--out", "joint", cwd=tmp_path
    ).json  # one object on stdout: the other rank printed nothing
    alone = run_paralab(*arguments, "--replicas", "2", "--out", "alone", cwd=tmp_path).json
    assert joint["losses"] == alone["losses"]  # bit for bit
    assert joint["status"] == "completed"
    files = {
        str(path.relative_to(tmp_path / "joint"))
        for path in (tmp_path / "joint").rglob("*")
        if path.is_file()
    }
    assert files == {
        str(path.relative_to(tmp_path / "alone"))
        for path in (tmp_path / "alone").rglob("*")
        if path.is_file()
    }
    assert [rank["local_rank"] for rank in joint["ranks"]] == [0, 1]
    assert len({rank["pid"] for rank in joint["ranks"]}) == 2


@pytest.mark.processes
def test_torchrun_with_the_wrong_number_of_ranks_says_so_once(tmp_path):
    done = torchrun("run", "ddp", "--replicas", "3", cwd=tmp_path, python=forked.python())
    assert done.code == 1  # torchrun's exit code; its output contains the ranks' codes
    assert done.out.count("paralab: ddp --replicas 3 ") == 1
    assert "exitcode  : 2" in done.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.processes
def test_the_rank_that_failed_is_named_once(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    environment = {"FAILING_RANK": "1"}
    done = torchrun(
        "run",
        "ddp",
        "--workload",
        "slow.py:workload",
        "--out",
        "run",
        cwd=tmp_path,
        environment=environment,
        python=forked.python(),
    )
    assert done.code == 1
    assert (
        done.out.count("paralab: Rank 1 failed in step 3: ValueError: a label that is no class")
        == 1
    )
    assert "Connection closed" not in done.out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] >= 2
    assert "a label that is no class" in (tmp_path / "run" / "logs" / "rank1.txt").read_text()


@pytest.mark.processes
def test_a_signal_to_torchrun_saves_and_ends_all_and_leaves_a_readable_folder(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    command = words(
        "run",
        "ddp",
        "--workload",
        "slow.py:workload",
        "--steps",
        "10000",
        "--out",
        "run",
        "--checkpoint",
        "kept",
    )
    with launched(*command, cwd=tmp_path) as process:
        wait_for_steps(tmp_path, 3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert err.count("paralab: Stopped and saved after") == 1
    reached = json.loads((tmp_path / "run" / "result.json").read_text())["reached_step"]
    assert reached >= 3
    assert [(kept.step, kept.problem) for kept in checkpoints(tmp_path / "kept", check=True)] == [
        (reached, None)
    ]


@pytest.mark.processes
def test_a_run_that_torchrun_restarts_resumes(tmp_path):
    """A rank is killed in step 8. torchrun's second attempt starts from the last complete checkpoint
    and writes to a new folder."""
    fault = plant(tmp_path / "mark", kind="kill", rank=1, phase="step", step=8)
    run = ("run", "ddp", "--workload", "cnn:tiny", "--steps", "12", "--out", "run")
    run += ("--checkpoint", "kept", "--checkpoint-every", "3")
    agent = ("--launcher", "torchrun", "--max-restarts", "1")
    command = (sys.executable, "-m", "paralab", *run, *agent, "--json")
    with launched(*command, cwd=tmp_path, environment=fault) as process:
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, err
    first, second = out.splitlines()
    assert "was killed by SIGKILL" in json.loads(first)["error"]
    result = json.loads(second)
    assert result["begun_at_step"] in (3, 6)  # the save after step 6 may have been incomplete
    assert (result["reached_step"], result["run_folder"]) == (12, "run-restart1")


@pytest.mark.usefixtures("own_torch")
def test_two_hosts_are_one_run(tmp_path):
    """Two hosts (network namespaces) share a cable. Each runs torchrun; both ranks write to one run
    folder and use one clock."""
    reason = why_not()
    if reason and not os.environ.get("PARALAB_REQUIRE_LINK"):
        pytest.skip(reason)
    with link(1000) as (options, _):

        def host(node):
            inside = prefix_words(options[1], node, node)
            rendezvous = (
                "--nnodes=2",
                "--nproc_per_node=1",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=10.77.0.1:29400",
            )
            rendezvous += (
                "--rdzv-id=test",
                f"--rdzv-conf=is_host={node == 0}",
                f"--local-addr=10.77.0.{node + 1}",
            )
            run = ("run", "ddp", "--workload", "cnn:tiny", "--steps", "4", "--json", "--out", "run")
            return launched(*inside, *words(*run, rendezvous=rendezvous), cwd=tmp_path)

        with host(0) as first, host(1) as second:
            outputs = [process.communicate(timeout=DEADLINE_SECONDS) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    printed = [out for out, _ in outputs if out]
    assert len(printed) == 1
    result = json.loads(printed[0])
    assert [(rank["rank"], rank["local_rank"]) for rank in result["ranks"]] == [(0, 0), (1, 0)]
    assert len({rank["node"] for rank in result["ranks"]}) == 2
    # One clock: ranks exchange gradients, so no rank finishes a step before the other begins it.
    for step in Recording.read(tmp_path / "run").steps:
        assert max(event["start"] for event in step) < min(event["end"] for event in step)


@pytest.mark.processes
def test_all_ranks_use_rank_0s_clock(tmp_path):
    """A time namespace simulates another machine's clock. Rank 1's is 1000 s ahead."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare (util-linux)")
    prefix = "unshare --time --fork --kill-child --monotonic {rank}000"
    tried = subprocess.run([*prefix_words(prefix, 1, 1), "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"time namespaces cannot be made: {tried.stderr.strip()}")
    begin = time.perf_counter()
    arguments = ("--workload", "cnn:tiny", "--steps", "4", "--out", "run")
    done = run_paralab("run", "ddp", "--prefix", prefix, *arguments, cwd=tmp_path)
    assert done.code == 0, done.err
    recording = Recording.read(tmp_path / "run")
    ours, theirs = (recording.of(Start, rank)[0] for rank in (0, 1))
    assert (ours["clock_offset_seconds"], ours["clock_uncertainty_seconds"]) == (0, 0)
    assert QUESTIONS >= 20
    assert 0 < theirs["clock_uncertainty_seconds"] < 1
    assert theirs["clock_offset_seconds"] == pytest.approx(
        -1000, abs=theirs["clock_uncertainty_seconds"] + 1e-6
    )
    assert 0 < theirs["time"] < time.perf_counter() - begin
    for step in recording.steps:
        assert max(event["start"] for event in step) < min(event["end"] for event in step)
