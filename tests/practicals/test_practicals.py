"""The practicals' scripts, and the output that students read. Every script starts once per
configuration (module-scoped fixtures). Most are forked from a process that has imported torch
(tests/forked.py). `practical6_ddp.py` and the failing script run under the real torchrun, and
`practical5_single.py` under the real Python.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "practicals"
DEADLINE_SECONDS = 200
TINY = {"DIM": "16", "STEPS": "3", "BATCH_SIZE": "64"}
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def launch(
    script: Path,
    ranks: int,
    arguments: tuple[str, ...] = (),
    launcher: list[str] | None = None,
    **env: str,
) -> tuple[int, str]:
    """Run a script in one process (ranks = 0) or several. Return the exit code and the output, and
    check that no process remains."""
    outside = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    process = subprocess.Popen(
        [*(launcher or forked.python(ranks)), str(script), *arguments],
        env=outside | {"OMP_NUM_THREADS": "1"} | TINY | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{script.name} was still running after {DEADLINE_SECONDS} s:\n{output}")
    with pytest.raises(ProcessLookupError):  # no process in the launch's group is alive
        os.killpg(process.pid, 0)
    return process.returncode, output


def run(name: str, ranks: int = 0, launcher: list[str] | None = None, **env: str) -> str:
    code, output = launch(SCRIPTS / name, ranks, launcher=launcher, **env)
    assert code == 0, output
    return output


def numbers(pattern: str, output: str) -> list[float]:
    found = re.findall(pattern, output)
    assert found, f"{pattern!r} is not in:\n{output}"
    return [float(number) for number in found]


def final_loss(output: str) -> float:
    (loss, *others) = set(numbers(r"Final loss: ([\d.]+)", output))
    assert not others, "the ranks print different losses"
    return loss


# --- Practical 5: DataParallel
# -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single() -> str:
    return run("practical5_single.py", launcher=PYTHON)


@pytest.fixture(scope="module")
def three_replicas() -> str:
    return run("practical5_dp.py", REPLICAS="3")


def seen_by_the_model(output: str) -> list[int]:
    return sorted(
        map(
            int, numbers(r"Inside model on device \S+, shape: torch\.Size\(\[(\d+), 16\]\)", output)
        )
    )


def test_single_shows_one_device_with_the_whole_batch(single: str) -> None:
    assert seen_by_the_model(single) == [64]
    assert "Devices used: 1" in single
    assert numbers(r"Step time: ([\d.]+) ms", single)[0] > 0
    assert numbers(r"Total training time: ([\d.]+) s", single)[0] > 0
    assert numbers(r"Memory: (\d+) MiB", single)[0] > 0


def test_64_samples_over_3_devices_are_22_22_20(three_replicas: str) -> None:
    assert seen_by_the_model(three_replicas) == [20, 22, 22]
    assert "Devices used: 3" in three_replicas
    assert "22/22/20" in three_replicas


def test_dataparallel_trains_like_the_single_device(single: str, three_replicas: str) -> None:
    assert final_loss(three_replicas) == pytest.approx(final_loss(single), abs=2e-6)


def test_without_a_gpu_dataparallel_says_that_it_is_emulated(
    single: str, three_replicas: str
) -> None:
    assert ("EMULATED" in three_replicas and "virtual" in three_replicas) == (
        "device cpu" in single
    )


# --- Practical 6: DistributedDataParallel
# ------------------------------------------------------------------


@pytest.fixture(scope="module")
def ddp() -> str:
    return run("practical6_ddp.py", ranks=2, launcher=TORCHRUN, BUCKET_MB="0.001")


def test_ddp_names_every_rank_and_its_device(ddp: str) -> None:
    ranks = re.findall(r"Rank: (\d) \| Local Rank: (\d) \| World size: (\d) \| Device: (\S+)", ddp)
    assert sorted(rank[:3] for rank in ranks) == [("0", "0", "2"), ("1", "1", "2")]
    assert len(set(re.findall(r"Process: (\d+)", ddp))) == 2


def test_ddp_gives_every_rank_half_of_the_batch_and_the_same_weights(ddp: str) -> None:
    assert re.findall(r"my share: (\d+) of 64", ddp) == ["32", "32"]
    assert len(set(re.findall(r"sum of weights (\S+)", ddp))) == 1


def test_ddp_reduces_every_gradient_inside_backward(ddp: str) -> None:
    # 16 -> 64 -> 64 -> 16 with biases: (16*64 + 64) + (64*64 + 64) + (64*16 + 16) = 6288 gradients
    # of 4 bytes
    megabytes = numbers(r"All-reduce \d of the last step: ([\d.]+) MB", ddp)
    assert len(megabytes) > 1, "a bucket size of 0.001 MB must give several buckets"
    assert sum(megabytes) == pytest.approx(6288 * 4 / 1e6, abs=0.02)
    assert all(0 <= percent <= 100 for percent in numbers(r"at (\d+)% of backward", ddp))


def test_ddp_trains_like_the_single_device(single: str, ddp: str) -> None:
    assert final_loss(ddp) == pytest.approx(final_loss(single), abs=2e-6)


def test_ddp_says_when_samples_are_dropped(ddp: str) -> None:
    assert "dropped" not in ddp
    uneven = run("practical6_ddp.py", ranks=2, BATCH_SIZE="65", STEPS="1")
    assert "64 of 65" in uneven
    assert "dropped" in uneven


# --- Practical 7: accumulation and mixed precision
# ---------------------------------------------------------

ACCUMULATION = {"ACCUM_STEPS": "4", "STEPS": "12"}  # 12 backward passes, 3 optimizer steps


@pytest.fixture(scope="module")
def with_no_sync() -> str:
    return run("practical7_accumulation.py", ranks=2, **ACCUMULATION)


@pytest.fixture(scope="module")
def without_no_sync() -> str:
    return run("practical7_accumulation.py", ranks=2, NO_SYNC="0", **ACCUMULATION)


def test_no_sync_synchronizes_only_before_the_optimizer_step(with_no_sync: str) -> None:
    assert "64 = 2 ranks x 4 accumulation steps x 8 samples" in with_no_sync
    assert "no_sync() used: 3 of 12 steps synchronized" in with_no_sync
    assert "Optimizer steps: 3 | all-reduces: 3 " in with_no_sync


def test_removing_no_sync_synchronizes_every_step(without_no_sync: str) -> None:
    assert "no_sync() REMOVED: 12 of 12 steps synchronized" in without_no_sync
    assert "Optimizer steps: 3 | all-reduces: 12 " in without_no_sync


def test_gradients_are_local_until_they_are_synchronized(with_no_sync: str) -> None:
    norms: dict[str, set[str]] = {}
    for step, norm in re.findall(r"step (\d) \| rank \d \| gradient norm (\S+)", with_no_sync):
        norms.setdefault(step, set()).add(norm)
    assert {step: len(different) for step, different in norms.items()} == {
        "1": 2,
        "2": 2,
        "3": 2,
        "4": 1,
    }


def test_accumulation_trains_like_the_whole_batch_at_once(
    single: str, with_no_sync: str, without_no_sync: str
) -> None:
    assert final_loss(with_no_sync) == pytest.approx(final_loss(single), abs=2e-6)
    assert final_loss(without_no_sync) == pytest.approx(final_loss(single), abs=2e-6)


@pytest.fixture(scope="module")
def amp() -> str:
    return run("practical7_amp.py", ranks=2, LOSS_WEIGHT="1e-5")


def zero_gradients(setup: str, output: str) -> float:
    return numbers(rf"{setup} .*\| +(\d+) \(", output)[0]


def test_float16_gradients_underflow_and_the_scaler_rescues_them(amp: str) -> None:
    if "products fail on this CPU" in amp:
        pytest.skip("this CPU cannot multiply float16 matrices")
    exact, lost, rescued = (
        zero_gradients(s, amp) for s in ("float32", "float16, NO GradScaler", "float16, GradScaler")
    )
    assert lost > 10 * (exact + 1)
    assert rescued < lost / 10


def test_mixed_precision_reports_speed_size_and_difference(amp: str) -> None:
    rows = {
        line.split(" |")[0].strip(): line.split("|")
        for line in amp.splitlines()
        if " ms | " in line
    }
    assert list(rows) == ["float32", "float16, NO GradScaler", "float16, GradScaler"]
    assert rows["float32"][2].strip() == "1.00x"
    assert float(rows["float32"][-1]) == 0 < float(rows["float16, GradScaler"][-1]) < 0.01


def test_without_scaler_or_usable_cpu_amp_says_so_and_never_crashes(tmp_path: Path) -> None:
    # On some virtual machines, the first float16 product kills the process with SIGILL. Here, the
    # trial's process dies that way.
    dying_probe = "import os, sys\nif '-c' in sys.orig_argv: os.kill(os.getpid(), 4)\n"
    (tmp_path / "sitecustomize.py").write_text(dying_probe)
    output = run(
        "practical7_amp.py", USE_SCALER="0", PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES=""
    )
    assert "float16 products fail on this CPU" in output
    assert "NO GradScaler" in output
    assert ", GradScaler" not in output


# --- Practical 10: hybrid
# ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid() -> str:
    return run("sample.py", ranks=2, MICRO_BATCHES="4")


@pytest.fixture(scope="module")
def hybrid_uneven() -> str:
    return run("sample.py", ranks=2, MICRO_BATCHES="2", SAME_DEVICE="1", BATCH_SIZE="61")


@pytest.fixture(scope="module")
def one_process() -> str:
    return run("sample.py", MICRO_BATCHES="1", BATCH_SIZE="61")


def test_every_rank_holds_two_devices_and_flows_four_micro_batches(hybrid: str) -> None:
    #            stage 0   stage 1
    # rank 0     0         2
    # rank 1     1         3
    stages = re.findall(r"Rank: (\d) .* stage 0 on \w+:(\d), stage 1 on \w+:(\d)", hybrid)
    assert sorted(stages) == [("0", "0", "2"), ("1", "1", "3")] or "share" in hybrid
    assert sorted(re.findall(r"Rank: (\d) \| micro-batch (\d)/4: 8 samples", hybrid)) == [
        (rank, number) for rank in "01" for number in "1234"
    ]
    # 3 steps x 4 micro-batches; 3 steps x 6 parameter tensors, once per step after the last
    # micro-batch
    assert hybrid.count("3 steps: 12 forward and 12 backward passes, 18 all-reduces, ") == 2


def test_ranks_hold_the_same_gradient_only_after_averaging(hybrid: str) -> None:
    norms = re.findall(r"gradient norm (\S+) -> mean over all ranks (\S+)", hybrid)
    local, averaged = zip(*norms, strict=True)
    assert len(set(local)) == 2
    assert len(set(averaged)) == 1


def test_four_micro_batches_on_two_ranks_train_like_the_single_device(
    single: str, hybrid: str
) -> None:
    assert final_loss(hybrid) == pytest.approx(final_loss(single), abs=2e-6)


def test_one_process_takes_all_samples_and_synchronizes_with_nobody(one_process: str) -> None:
    assert "Rank: 1" not in one_process
    assert "3 steps: 3 forward and 3 backward passes, 0 all-reduces" in one_process
    assert "no synchronization happens" in one_process


def test_same_device_uses_one_device(hybrid: str, hybrid_uneven: str) -> None:
    assert hybrid_uneven.count("devices used: 1") == 2
    assert hybrid.count("devices used: 2") == 2 or "share" in hybrid


def test_unequal_shares_and_micro_batches_train_like_one_whole_batch(
    hybrid_uneven: str, one_process: str
) -> None:
    # 61 samples: rank 0 takes 31 = 16 + 15, rank 1 takes 30 = 15 + 15
    assert sorted(map(int, re.findall(r"micro-batch \d/2: (\d+) samples", hybrid_uneven))) == [
        15,
        15,
        15,
        16,
    ]
    assert final_loss(hybrid_uneven) == pytest.approx(final_loss(one_process), abs=2e-6)


# --- Handbook: train_with_ddp
# ------------------------------------------------------------------------------

TRAIN_WITH_DDP = ROOT / "examples" / "train_with_ddp.py"


def test_train_with_ddp_logs_once_and_equals_one_process() -> None:
    small = ("--train-samples", "256", "--epochs", "2")
    outputs = [launch(TRAIN_WITH_DDP, ranks, small) for ranks in (0, 2)]
    assert [code for code, _ in outputs] == [0, 0], outputs
    losses = [numbers(r"validation loss ([\d.]+)", output) for _, output in outputs]
    assert [len(of_run) for of_run in losses] == [3, 3], (
        "rank 0 alone logs: before training and 2 epochs"
    )
    assert losses[1] == pytest.approx(losses[0], abs=2e-6)
    assert losses[0][-1] < losses[0][0] / 2


def test_train_with_ddp_ends_cleanly_on_an_error() -> None:
    code, output = launch(TRAIN_WITH_DDP, 2, ("--batch-size", "65"), TORCHRUN)
    assert code != 0
    assert "ValueError: batch_size 65 " in output
    assert " 64, " in output
    assert "destroy_process_group() was not called" not in output


# --- The text of the scripts
# -------------------------------------------------------------------------------

QUOTED = {
    "practical5_single.py": ['print(f"Inside model on device {x.device}, shape: {x.shape}")'],
    "practical5_dp.py": [
        'print(f"Inside model on device {x.device}, shape: {x.shape}")',
        "nn.DataParallel(",
    ],
    "practical6_ddp.py": [
        "x, y = get_batch(BATCH_SIZE // dist.get_world_size(), DIM, device)",
        "| Local Rank: {local_rank}",
        "loss.backward()",
    ],
    "practical7_accumulation.py": [
        "loss = loss_fn(output, y) / ACCUM_STEPS",
        "model.no_sync()",
        "if (step + 1) % ACCUM_STEPS == 0",
    ],
    "practical7_amp.py": [
        "with autocast(device_type=",
        "scaler.scale(loss).backward()",
        "scaler.step(optimizer)",
        "scaler.update()",
    ],
    "sample.py": ["cuda:{local_rank}", "cuda:{local_rank + 2}", '"MICRO_BATCHES"', '"BATCH_SIZE"'],
}


@pytest.mark.parametrize("name", QUOTED)
def test_a_script_is_short_plain_and_holds_the_quoted_lines(name: str) -> None:
    text = (SCRIPTS / name).read_text()
    assert [line for line in QUOTED[name] if line not in text] == []
    assert 60 <= len(text.splitlines()) <= 135
    assert "paralab" not in text


def test_every_script_is_covered() -> None:
    assert {path.name for path in SCRIPTS.glob("*.py")} == set(QUOTED)
