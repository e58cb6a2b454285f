"""The preflight: each machine check reports its bad facts and is silent on good ones. The last tests
check this machine."""

import os
import resource
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from paralab.doctor import environment, probes
from paralab.doctor.catalog import apply
from paralab.doctor.environment import Address, Disk, Memory, Port, launch_of
from paralab.doctor.preflight import Facts, gather_facts, table
from paralab.doctor.probes import Gpu, Link, Pair, Torch
from paralab.doctor.show.findings import print_facts
from paralab.machine.precision import Probe

GIB = 2**30
H200 = Gpu("NVIDIA H200", 141 * GIB, 132)
CPU_TORCH = Torch("2.13.0+cpu", None, ("gloo",), (), 1)
WORKS = Probe(True, "bf16 trained in a trial process")


def machine(environment=None, **parts):
    """Return the facts of a good machine with eight cores and no GPU, with these changes."""
    environment = environment or {}
    sound = Facts(
        environment=environment,
        launch=launch_of(environment),
        cores=8,
        machine_cores=8,
        memory_bytes=64 * GIB,
        cgroup=Memory(64 * GIB, GIB, 0),
        torch=CPU_TORCH,
        port=Port(29500, asked=False, free=True),
        host="lab",
        host_address="10.0.0.1",
        shared_bytes=8 * GIB,
        disks=(Disk("/tmp", True, 100 * GIB),),
        open_files=65536,
        megabits={"eth0": 10_000},
        precisions={"bf16": WORKS, "fp16": WORKS},
        link=Link("gloo", ("rank 0", "rank 1"), 25 * 2**20, 0.035, 0.005),
        unknown={"GPU pairs": "torch sees 0 GPUs"},
    )
    return replace(sound, **parts)


def with_gpus(*gpus, environment=None, **parts):
    torch = Torch("2.13.0+cu130", "13.0", ("gloo", "nccl"), gpus, 1)
    return machine(
        environment, torch=torch, driver_gpus=gpus, **{"cores": 64, "machine_cores": 64, **parts}
    )


def check_facts(facts):
    return [(finding.id, finding.severity) for finding in apply("machine", facts)]


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MEETING}
EIGHT = {**TORCHRUN, "OMP_NUM_THREADS": "8"}
ILLEGAL = Probe(
    True, "a trial process was killed by SIGILL; …", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
)
NCCL_LINK = Link("nccl", ("cuda:0", "cuda:1"), 25 * 2**20, 0.001, 0.0001)
DEAD = replace(NCCL_LINK, seconds=None, copy_seconds=None, problem="no response within 20 s")


def test_sound_machines_give_nothing():
    assert check_facts(machine()) == []
    assert check_facts(with_gpus(H200, H200, pairs=(Pair(NCCL_LINK, None),))) == []
    assert check_facts(machine(TORCHRUN, address=Address("127.0.0.1", "127.0.0.1"))) == [], (
        "one machine may meet on its own address"
    )
    assert (
        check_facts(
            machine({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}, cores=2)
        )
        == []
    )
    served = Port(29500, True, False, 77, "torchrun")  # by torchrun itself
    assert check_facts(machine({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, port=served)) == []
    tasks = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_PER_TASK": "1",
    }
    assert check_facts(with_gpus(H200, environment={**tasks, "CUDA_VISIBLE_DEVICES": "0"})) == []


@pytest.mark.parametrize(
    ("facts", "expected", "words"),
    [
        (
            machine(port=Port(29512, True, False, 4711, "python old.py")),
            ("L01", "error"),
            "rocess 4711 (python old.py)",
        ),
        (machine(port=Port(29500, False, False)), ("L01", "suspect"), "port 29500"),
        (
            machine({"RANK": "1", "WORLD_SIZE": "2"}),
            ("L02", "error"),
            "MASTER_ADDR and MASTER_PORT",
        ),
        (
            machine({"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}),
            ("L02", "error"),
            "but not RANK",
        ),
        (
            machine({**TORCHRUN, "RANK": "2"}),
            ("L02", "error"),
            "RANK=2 is out of range for WORLD_SIZE=2",
        ),
        (
            machine(TORCHRUN, address=Address("nod01", None, None, "unknown name")),
            ("H18", "error"),
            "nod01 does not resolve",
        ),
        (
            machine({**TORCHRUN, "WORLD_SIZE": "4"}, address=Address("localhost", "127.0.0.1")),
            ("H18", "error"),
            "MASTER_ADDR=localhost",
        ),
        (
            machine({**TORCHRUN, "RANK": "1"}, address=Address("n1", "10.0.0.9", False, "refused")),
            ("H18", "suspect"),
            "Rank 1 cannot connect to n1:29500 (refused)",
        ),
        (machine(host_address=None), ("H18", "suspect"), "lab, does not resolve"),
        (
            machine({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
            ("H19", "error"),
            "torch 2.13.0+cpu",
        ),
        (
            with_gpus(H200, environment={"TORCH_DISTRIBUTED_DEBUG": "detail"}),
            ("H19", "suspect"),
            "certain if your backend is gloo",
        ),
        (
            machine(driver_gpus=(H200,)),
            ("L05", "error"),
            "has 1 GPU, but torch 2.13.0+cpu is built without CUDA",
        ),
        (
            machine(torch=replace(CPU_TORCH, backends=())),
            ("L05", "error"),
            "without torch.distributed",
        ),
        (
            with_gpus(H200, H200, environment={"CUDA_VISIBLE_DEVICES": "0,0"}),
            ("L03", "error"),
            "names GPU 0 twice",
        ),
        (
            with_gpus(H200, H200, environment={"CUDA_VISIBLE_DEVICES": "0,2"}),
            ("L03", "error"),
            "ignores 2 and everything after it",
        ),
        (
            with_gpus(H200, environment=EIGHT),
            ("L03", "error"),
            "2 ranks on this machine share 1 GPU",
        ),
        (
            machine(EIGHT, torch=replace(CPU_TORCH, threads=8)),
            ("L09", "warning"),
            "2 ranks × 8 compute",
        ),
        (
            machine({**TORCHRUN, "OMP_NUM_THREADS": "1"}),
            ("L09", "suspect"),
            "each rank uses one thread, but could use 4",
        ),
        (
            with_gpus(H200, H200, cores=2),
            ("T06", "suspect"),
            "2 cores (of 64 ",
        ),
        (machine(precisions={"bf16": ILLEGAL}), ("L10", "error"), "killed by SIGILL"),
        (
            machine(shared_bytes=64 * 2**20),
            ("L11", "suspect"),
            "2 ranks × 2 loader workers",
        ),
        (
            with_gpus(H200, Gpu("NVIDIA T4", 16 * GIB, 40)),
            ("D07", "warning"),
            "GPU 1 (NVIDIA T4, 16.0 GiB) is weaker",
        ),
        (machine(cgroup=Memory(4 * GIB, 3 * GIB, 0)), ("H12", "suspect"), "1.0 GiB of its 4.0 GiB"),
        (machine(cgroup=Memory(None, GIB, 3)), ("H12", "suspect"), "killed 3 processes"),
        (
            machine(disks=(Disk("/data", False, 9 * GIB),)),
            ("M01", "error"),
            "/data is not writable",
        ),
        (
            machine(disks=(Disk("/data", True, 2**20),)),
            ("M01", "suspect"),
            "1.0 MiB left",
        ),
        (machine(open_files=256), ("M02", "suspect"), "may open 256 files"),
        (
            machine(locked_bytes=2**23, infiniband=("mlx5_0",)),
            ("M02", "suspect"),
            "InfiniBand (mlx5_0)",
        ),
        (
            machine(link=Link("gloo", ("rank 0", "rank 1"), 25 * 2**20, 2.0, 0.005)),
            ("M03", "suspect"),
            "400 times as long",
        ),
        (
            machine(link=Link("gloo", ("rank 0", "rank 1"), 1, None, None, "no response")),
            ("M03", "suspect"),
            "did not complete an all-reduce",
        ),
        (
            machine(
                {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"},
                megabits={"eth0": 1000},
            ),
            ("M03", "warning"),
            "at least 210 ms",
        ),
        (
            with_gpus(H200, H200, pairs=(Pair(DEAD, NCCL_LINK),)),
            ("H15", "error"),
            "with NCCL_P2P_DISABLE=1 (",
        ),
        (
            with_gpus(H200, H200, pairs=(Pair(DEAD, DEAD),)),
            ("H15", "suspect"),
            "NCCL_P2P_DISABLE=1: ",
        ),
        (
            with_gpus(H200, H200, pairs=(Pair(replace(NCCL_LINK, seconds=1.0), None),)),
            ("M03", "suspect"),
            "25.0 MiB/s",
        ),
    ],
)
def test_each_rule_bites_alone(facts, expected, words):
    (finding,) = apply("machine", facts)
    assert (finding.id, finding.severity) == expected
    assert words in finding.why
    assert any(row.findings == (finding.id,) for row in table(facts, [finding])), (
        "the table shows it where it was seen"
    )
    if finding.severity == "suspect":
        assert "certain" in finding.why


def test_the_tasks_of_slurm_against_world_size():
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NNODES": "2",
    }
    assert ("H18", "error") in check_facts(machine({**step, **TORCHRUN}))
    assert check_facts(machine({**step, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"})) == [], (
        "srun torchrun: a task per node"
    )


def test_gpus_that_are_hidden_from_torch():
    hidden = machine(
        {"CUDA_VISIBLE_DEVICES": ""},
        torch=Torch("2.13", "13.0", ("gloo", "nccl"), (), 1),
        driver_gpus=(H200,),
    )
    assert check_facts(hidden) == [("L03", "warning")]
    assert check_facts(machine({"CUDA_VISIBLE_DEVICES": ""})) == []


def test_an_illegal_instruction_comes_with_its_tried_cure():
    (finding,) = apply("machine", machine(precisions={"bf16": ILLEGAL}))
    assert finding.fix.startswith("export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16")
    slow = Probe(False, "a trial process did not finish within 15 s")
    assert check_facts(machine(precisions={"bf16": slow})) == [], "a busy machine is no broken one"


@pytest.mark.parametrize(
    ("environment", "ranks", "local", "nodes", "by"),
    [
        ({}, None, None, None, None),
        (TORCHRUN, 2, 2, None, "RANK and WORLD_SIZE"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, 2, 2, None, "torchrun"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, 4, 2, 2, "Slurm"),
        (
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "2"},
            None,
            8,
            2,
            "Slurm",
        ),
    ],
)
def test_what_a_launcher_says(environment, ranks, local, nodes, by):
    launch = launch_of(environment)
    assert (launch.ranks, launch.local_ranks, launch.nodes, launch.by) == (ranks, local, nodes, by)


def test_the_owner_of_a_port_is_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = listener.getsockname()[1]
        port = environment.inspect_port({"MASTER_PORT": str(number)})
        assert (port.free, port.asked) == (False, True)
        if sys.platform == "linux":
            assert port.owner_pid == os.getpid()
    assert environment.inspect_port({"MASTER_PORT": str(number)}).free


def test_an_address_is_resolved_and_tried_by_those_who_connect():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        assert environment.inspect_address({**there, "RANK": "1"}).connects is True
        assert environment.inspect_address({**there, "RANK": "0"}).connects is None, (
            "rank 0 opens it itself"
        )
    assert environment.inspect_address({**there, "RANK": "1"}).connects is False
    assert environment.inspect_address({}) is None


def test_a_name_server_without_an_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(environment, "ANSWER_SECONDS", 0.05)

    def answer_late(*_, **__):
        time.sleep(1)
        return [(0, 0, 0, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer_late)
    assert environment.resolve("nowhere")[0] is None


def test_a_container_with_a_limit(tmp_path):
    assert environment.inspect_cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text("4294967296\n")
    (tmp_path / "memory.current").write_text("1024\n")
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert environment.inspect_cgroup(tmp_path) == Memory(4 * GIB, 1024, 1)
    (tmp_path / "memory.max").write_text("max\n")
    assert environment.inspect_cgroup(tmp_path).limit_bytes is None


def test_gpu_pairs_go_round_the_ring(monkeypatch):
    tried = []
    monkeypatch.setattr(
        probes,
        "two_ranks",
        lambda backend, devices, environment=None: (None, tried.append(devices) or NCCL_LINK),
    )
    for gpus, ring in [
        (2, {(0, 1)}),
        (3, {(0, 1), (1, 2), (2, 0)}),
        (4, {(0, 1), (1, 2), (2, 3), (3, 0)}),
    ]:
        tried.clear()
        assert len(probes.gpu_pairs(gpus)) == len(ring)
        assert set(tried) == ring
    assert len(set(probes.gpu_pairs(8))) == 1


def test_a_link_without_a_time_is_not_good():
    late = Link("gloo", ("rank 0", "rank 1"), 1, None, None, "no response within 20 s")
    for link, verdict in ((machine().link, "good"), (late, "not checked")):
        assert {row.name: row.verdict for row in table(machine(link=link), [])}[
            "all-reduce"
        ] == verdict


@pytest.mark.processes
def test_a_trial_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(probes, "SECONDS", 0.2)  # no process has imported torch by then
    torch, link = probes.two_ranks("gloo")
    assert torch is None
    assert link.problem == "no response within 0 s"
    assert children_of(os.getpid()) == []


def children_of(pid):
    done = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True
    )
    return [line for line in done.stdout.splitlines() if "paralab.observe" in line]


@pytest.mark.processes
def test_this_machine_is_checked_in_time_and_nothing_is_left_running(capsys):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = gather_facts()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # It takes 15 s on two idle cores. On a busy machine, only the CPU time is meaningful.
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 30
    assert children_of(os.getpid()) == []
    busy = facts.link.problem is not None and facts.link.problem.startswith(
        "no response"
    )  # within its deadline
    assert facts.link.seconds or busy, facts.link
    assert "torch" in facts.unknown if facts.torch is None else "gloo" in facts.torch.backends
    assert facts.torch is not None or busy
    assert facts.cores >= 1
    assert all(
        name in facts.precisions or f"{name} on CPU" in facts.unknown for name in ("bf16", "fp16")
    )
    findings = apply("machine", facts)
    print_facts(table(facts, findings))
    shown = capsys.readouterr().out
    assert "all-reduce" in shown
    assert "GPU pairs" in shown
