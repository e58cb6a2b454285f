"""Workloads (in `hunters.py`) for which a proof was once false, or training was once silently
wrong."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import run_paralab
from tests.parity.proofs import passed, verify

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent


def verified(folder, names, strategy="all", **options):
    """Verify workloads from hunters.py. Return {workload: {(strategy, schedule): cases}} and the
    proof."""
    shutil.copy(HERE / "hunters.py", folder)
    proof = verify(folder, [f"hunters.py:{name}" for name in names], strategy, **options)
    cases = {name: {} for name in names}
    for case in proof["configurations"]:
        by_strategy = cases[case["options"]["workload"].partition(":")[2]]
        by_strategy.setdefault((case["strategy"], case["options"].get("schedule")), []).append(case)
    return cases, proof


RIGHT = ("padded", "stateful", "noisy", "unused", "routed")


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """These are equal under every strategy that accepts them. 30 = 12 + 12 + 6 samples."""
    options = {"accumulate": 2, "samples": 30, "replicas": 2, "micro_batches": 2, "steps": 3}
    return verified(tmp_path_factory.mktemp("right"), [*RIGHT, "sparse"], **options)


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_equal_under_every_strategy(right, name):
    cases, proof = right
    assert [
        case["cause"] for chosen in cases[name].values() for case in chosen if not passed(case)
    ] == []
    # DDP's stages wait for every parameter's gradient, and FSDP's ranks must take the same
    # branches.
    missing = {"unused": {("hybrid", None)}, "routed": {("hybrid", None), ("fsdp", None)}}.get(
        name, set()
    )
    names = ("single", "dp", "ddp", "fsdp", "mp", "pipeline", "hybrid")
    wanted = {(strategy, None) for strategy in names} | {
        ("pipeline", "gpipe"),
        ("pipeline", "1f1b"),
        ("hybrid", "1f1b"),
    }
    assert cases[name].keys() >= wanted - missing
    assert proof["steps"] == 3


@pytest.mark.parametrize(("name", "control"), [("stateful", "state"), ("noisy", "random")])
def test_what_is_held_fixed_is_named_and_its_difference_reported(right, name, control):
    for case in right[0][name]["ddp", None]:
        assert case["control"] == [control]
        assert case["excused"]["max_difference"] > 1e-6


def test_buffers_are_compared_and_named(wrong):
    """Nothing reads these buffers, so the parameters are equal. Comparing only parameters is not
    enough."""
    [case] = wrong[0]["statistics"]["ddp", None]
    assert case["equal"]
    assert case["excused"]["max_difference"] <= 1e-10
    assert {name.rpartition(".")[2] for name in case["excused"]["buffers"]} == {"mean", "seen"}
    assert min(case["excused"]["buffers"].values()) > 0.01


def test_a_stateful_forward_is_not_called_random(right):
    state = right[1]["state"]
    assert {name.rpartition(".")[2] for name in state["hunters.py:stateful"]} == {
        "mean",
        "seen",
        "calls",
    }
    assert state.keys() == {"hunters.py:stateful"}


STEPS = 12  # both lengths occur several times, and step 7 takes the other branch


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    return verified(
        folder, ["lengths", "late"], accumulate=1, replicas=2, micro_batches=2, steps=STEPS
    )


def test_recurring_lengths_find_their_own_shapes(scheduled):
    cases = scheduled[0]["lengths"]
    assert {("pipeline", "1f1b"), ("pipeline", "gpipe"), ("hybrid", "1f1b")} <= cases.keys()
    assert all(
        passed(case) and case["steps"] == STEPS for chosen in cases.values() for case in chosen
    )


def test_a_branch_that_skips_a_stage_is_trained_or_refused_and_never_hangs(scheduled):
    cases, proof = scheduled
    zero_1 = [case for case in cases["late"]["fsdp", None] if case["options"].get("zero") == 1]
    assert all(
        case["equal"]
        for key in (("dp", None), ("fsdp", None), ("mp", None), ("pipeline", None))
        for case in cases["late"][key]
        if case not in zero_1
    )
    # DDP would step with gradients that are not reduced, and raise only in the next step, or never
    # after the last step.
    stopped = [case for key in (("ddp", None), ("hybrid", None)) for case in cases["late"][key]]
    assert len(zero_1) == 1
    stopped += zero_1
    assert all(
        "step 7" in case["cause"] and "b.weight, b.bias" in case["cause"] for case in stopped
    )
    refused = [case for case in proof["skipped"] if case["options"]["workload"].endswith("late")]
    assert {case["options"].get("schedule") for case in refused} >= {
        "gpipe",
        "1f1b",
        "interleaved",
        "zero-bubble",
    }
    assert all(
        "stage 1" in case["reason"]
        for case in refused
        if case["options"].get("schedule") in ("gpipe", "1f1b")
    )


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    names = [
        "batch_norm_summed",
        "noisy_root",
        "class_weights",
        "contrastive",
        "balanced_experts",
        "mixing",
        "mixing_before",
        "rare",
    ]
    names += ["noisy", "statistics", "statistics_used"]
    return verified(
        tmp_path_factory.mktemp("wrong"),
        names,
        "ddp",
        accumulate=1,
        replicas=2,
        samples=24,
        steps=2,
    )


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("batch_norm_summed", "sum"),
        ("noisy_root", "square root"),
        ("class_weights", "class weights"),
        ("contrastive", "not a mean"),
        ("balanced_experts", "not a mean"),
        ("mixing", "'2' mixes the samples"),
        ("mixing_before", "something before 'a' mixes the samples"),
        ("rare", "not a mean over the samples"),
    ],
)
def test_a_loss_that_is_not_a_mean_is_wrong_whatever_else_is_excused(wrong, name, cause):
    [case] = wrong[0][name]["ddp", None]
    assert not case["equal"]
    assert cause in case["cause"]
    assert not wrong[1]["passed"]


def test_a_lossy_configuration_does_not_hide_a_loss_that_is_not_a_mean(tmp_path):
    """The simulation splits the batch too, so they were equal. Single samples have no gradient
    here, which ended the whole command."""
    cases, proof = verified(tmp_path, ["contrastive"], "local-sgd", accumulate=6, samples=24)
    assert not proof["passed"]
    for case in cases["contrastive"]["local-sgd", None]:
        assert case["as_simulated"] is False
        assert "not a mean" in case["cause"]


@pytest.mark.parametrize("name", ["noisy", "statistics_used"])
def test_an_excuse_alone_is_not_a_mistake(wrong, name):
    [case] = wrong[0][name]["ddp", None]
    assert case["equal"]
    assert case["excused"]["max_difference"] > 1e-6


def test_low_precision_excuses_rounding_and_nothing_else(tmp_path):
    cases, proof = verified(
        tmp_path,
        ["root", "adam"],
        "ddp",
        accumulate=1,
        replicas=2,
        samples=24,
        steps=2,
        precision="bf16",
    )
    [root], [adam] = cases["root"]["ddp", None], cases["adam"]["ddp", None]
    assert not root["equal"]
    assert adam["equal"]
    assert adam["tolerance"] == 1e-10  # equal in fp64 …
    assert adam["excused"]["max_difference"] > 1e-5  # … and this far apart in bf16
    assert not proof["passed"]


def test_zero_gradients_prove_nothing(tmp_path):
    """Without a sum over ranks, zero gradients are equal too."""
    shutil.copy(HERE / "hunters.py", tmp_path)
    words = ("verify", "single", "--workload", "hunters.py:dead", "--steps", "2")
    done = run_paralab(*words, cwd=tmp_path)
    assert done.code == 1
    assert "gradients are zero" in done.err


@pytest.mark.parametrize(
    ("name", "step", "units"), [("experts", 0, ()), ("experts_late", 10, ("'e.0'",))]
)
def test_fsdp_ranks_that_take_different_branches_stop_before_shards_are_mixed(
    tmp_path, name, step, units
):
    shutil.copy(HERE / "hunters.py", tmp_path)
    done = run_paralab(
        "run",
        "fsdp",
        "--workload",
        f"hunters.py:{name}",
        "--steps",
        "12",
        "--out",
        "run",
        cwd=tmp_path,
    )
    assert done.code == 1
    assert f"in step {step}" in done.err
    assert "rank 0" in done.err or "rank 1" in done.err
    assert all(unit in done.err for unit in units)
    errors = [
        json.loads(line)
        for path in (tmp_path / "run/events").glob("*")
        for line in path.read_text().splitlines()
    ]
    assert not any(event["event"] == "step" and event["step"] > step for event in errors)


def test_sparse_gradients_train_on_one_device_and_under_ddp(right):
    cases, proof = right
    assert {strategy for strategy, _ in cases["sparse"]} == {"single", "ddp"}
    assert all(case["equal"] for chosen in cases["sparse"].values() for case in chosen)
    refused = [case for case in proof["skipped"] if case["options"]["workload"].endswith("sparse")]
    assert {case["strategy"] for case in refused} == {
        "ddp",  # with --compress
        "local-sgd",
        "dp",
        "fsdp",
        "tp",
        "cp",
        "ep",
        "mp",
        "pipeline",
        "hybrid",
    }
