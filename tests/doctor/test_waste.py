"""The waste checks on plain numbers: each reports above its threshold and is silent below."""

import pytest

from paralab.analyse.confidence import SpeedUp
from paralab.doctor.failures.accumulation.g02_every_pass_synchronizes import judge_synchronizations
from paralab.doctor.failures.data.t06_loader_workers import judge_data_wait
from paralab.doctor.failures.dataparallel.d02_gpu0_fills_up import judge_replicas
from paralab.doctor.failures.launch.l09_threads_and_cores import judge_threads
from paralab.doctor.failures.pipeline.p05_one_micro_batch import judge_bubble
from paralab.doctor.failures.waste.w01_much_communication import judge_communication
from paralab.doctor.failures.waste.w02_one_bucket import exposed_with, judge_buckets
from paralab.doctor.failures.waste.w03_slow_rank import judge_straggler
from paralab.doctor.failures.waste.w04_slow_low_precision import judge_precision
from paralab.doctor.failures.waste.w05_unequal_stages import judge_stages
from paralab.doctor.failures.waste.w06_loss_not_finite import falling, judge_losses

MIB = 2**20


def test_communication_over_a_tenth_of_the_step():
    found = judge_communication(
        communication=0.04, exposed=0.03, step=0.1, how="2 all-reduces, 24.0 MiB in total"
    )
    assert (found.id, found.severity, found.gain) == ("W01", "warning", pytest.approx(0.3))
    assert "40%" in found.why
    assert "30 ms" in found.why
    assert "24.0 MiB" in found.why
    assert judge_communication(communication=0.009, exposed=0.009, step=0.1, how="") is None
    assert judge_communication(communication=0.04, exposed=0.001, step=0.1, how="") is None, (
        "hidden, so it costs nothing"
    )
    assert judge_communication(communication=0.04, exposed=0.03, step=0, how="") is None, (
        "no step was measured"
    )


@pytest.mark.parametrize(
    ("buckets", "transfer", "backward", "left"),
    [
        (1, 4, 8, 4),  # nothing can overlap
        (4, 4, 8, 1),  # all but the last quarter
        (4, 8, 4, 5),  # the transfer is longer than the pass that could hide it
    ],
)
def test_what_buckets_leave_exposed(buckets, transfer, backward, left):
    assert exposed_with(buckets, transfer, backward) == left


def test_one_bucket_overlaps_with_nothing():
    found = judge_buckets([24 * MIB], backward=0.05, transfer=0.03, exposed=0.03, step=0.1)
    assert (found.id, found.gain) == (
        "W02",
        pytest.approx(0.225),
    )  # a quarter of 30 ms stays exposed
    assert "bucket_cap_mb=6" in found.fix
    assert "50 ms" in found.why
    assert "30 ms" in found.why
    nearly = judge_buckets(
        [2 * MIB, 22 * MIB], backward=0.05, transfer=0.03, exposed=0.03, step=0.1
    )
    assert "one of 2 buckets holds 92%" in nearly.why


def test_buckets_that_overlap_or_cannot_be_cut_are_left_alone():
    assert (
        judge_buckets([6 * MIB] * 4, backward=0.05, transfer=0.03, exposed=0.03, step=0.1) is None
    )
    assert judge_buckets([4096], backward=0.05, transfer=0.03, exposed=0.03, step=0.1) is None, (
        "all latency: two are slower"
    )
    assert (
        judge_buckets([24 * MIB], backward=0.05, transfer=0.001, exposed=0.001, step=0.1) is None
    ), "nothing to gain"
    assert judge_buckets([], backward=0.05, transfer=0.0, exposed=0.0, step=0.1) is None


def test_a_straggler_is_named_and_doubted_when_it_may_be_chance():
    found = judge_straggler(rank=3, waited=0.03, step=0.1, last_in=19, of=20)
    assert (found.id, found.severity, found.rank, found.gain) == (
        "W03",
        "warning",
        3,
        pytest.approx(0.3),
    )
    assert judge_straggler(rank=3, waited=0.015, step=0.1, last_in=19, of=20).severity == "suspect"
    assert judge_straggler(rank=3, waited=0.03, step=0.1, last_in=4, of=4).severity == "suspect", (
        "four steps are few"
    )
    assert (
        judge_straggler(rank=3, waited=0.03, step=0.1, last_in=16, of=20).severity == "suspect"
    ), "not always"
    # Seen on a busy machine, with two ranks that did the same:
    assert judge_straggler(rank=1, waited=0.00407, step=0.0069, last_in=9, of=12) is None
    assert judge_straggler(rank=3, waited=0.005, step=0.1, last_in=19, of=20) is None


def test_waiting_for_data():
    found = judge_data_wait(waited=0.1, step=0.3)
    assert (found.id, found.gain) == ("T06", 0.25)
    assert judge_data_wait(waited=0.01, step=0.3) is None
    assert judge_data_wait(waited=0.01, step=0) is None


def test_dataparallel_loads_its_first_device():
    assert "busy" not in judge_replicas([], [30, 10, 10], step=0.1).why
    found = judge_replicas([0.09, 0.05, 0.05], [10, 10, 10], step=0.1)
    assert (found.id, found.gain) == ("D02", pytest.approx(0.4))
    assert "1.80× as long" in found.why
    assert judge_replicas([0.06, 0.05], [12, 10], step=0.1) is None


def test_more_threads_than_cores():
    found = judge_threads(threads=2, processes=2, cores=2)
    assert found.id == "L09"
    assert "OMP_NUM_THREADS=1" in found.fix
    assert "2 processes × 2 compute threads = 4" in found.why
    assert "2 processes" in judge_threads(threads=1, processes=4, cores=2).fix
    assert judge_threads(threads=1, processes=2, cores=2) is None


def test_too_few_micro_batches():
    found = judge_bubble(measured=0.52, stages=2, micro_batches=1, schedule="gpipe", samples=64)
    assert found.id == "P05"
    assert "n_microbatches=8" in found.fix
    assert found.gain == pytest.approx(0.52 - 1 / 9)
    assert (
        judge_bubble(measured=0.2, stages=2, micro_batches=8, schedule="gpipe", samples=64) is None
    )
    assert (
        judge_bubble(measured=0.5, stages=2, micro_batches=1, schedule="gpipe", samples=1) is None
    ), "nothing to cut"


def test_stages_that_idle_more_than_their_schedule_makes_them():
    found = judge_stages(measured=0.35, ideal=0.2, busy=[0.02, 0.05])
    assert found.id == "W05"
    assert "Stage 1 computes the longest, 50 ms" in found.why
    assert found.gain == pytest.approx(0.15)
    assert judge_stages(measured=0.25, ideal=0.2, busy=[0.05, 0.05]) is None


def test_a_synchronization_in_every_pass():
    found = judge_synchronizations(all_reduces=8, buckets=2, passes=4, exposed=0.04, step=0.1)
    assert (found.id, found.gain) == ("G02", pytest.approx(0.3))
    assert "4 times" in found.why
    assert (
        judge_synchronizations(
            all_reduces=8, buckets=2, passes=4, exposed=0.04, step=0.1, stages=2
        ).id
        == "P06"
    )
    assert (
        judge_synchronizations(all_reduces=2, buckets=2, passes=4, exposed=0.04, step=0.1) is None
    )
    assert (
        judge_synchronizations(all_reduces=2, buckets=1, passes=1, exposed=0.04, step=0.1) is None
    ), "no accumulation"


def test_low_precision_that_is_slower():
    assert judge_precision("bf16", SpeedUp.of(0.8, 0.7, 0.9), "a CPU").severity == "warning"
    once = judge_precision("bf16", SpeedUp.of(0.8), "a CPU")
    assert (once.id, once.severity) == ("W04", "suspect")
    assert once.gain == pytest.approx(0.2)
    assert judge_precision("bf16", SpeedUp.of(0.8, 0.5, 1.3), "a CPU") is None
    assert judge_precision("bf16", SpeedUp.of(0.95), "a CPU") is None
    assert judge_precision("bf16", SpeedUp.of(1.9, 1.8, 2.0), "a GPU") is None


def test_a_loss_that_is_lost():
    found = judge_losses([1.0, None, None], [8.0, 4.0, 2.0], first=10)
    assert (found.id, found.severity) == ("A08", "error")
    assert "from step 11 on (2 of 3 steps)" in found.why
    assert judge_losses([1.0, None, None], []).id == "W06"
    assert judge_losses([1.0, 0.9, 0.8, 0.8], [16.0, 8.0, 4.0, 2.0]).id == "A08", (
        "the scale falls for ever"
    )
    assert judge_losses([1.0, 0.9], [65536.0, 32768.0]) is None, "GradScaler looks for its scale"
    assert judge_losses([1.0, None, 0.9], []) is None, "one bad batch"
    assert falling([4, 8, 4, 2, 1]) == 3
