"""Expert parallelism: parity, all-to-alls, memory, checkpoints, and mistakes that are caught."""

import shutil

import pytest

from tests.conftest import run_paralab
from tests.parity.proofs import verify
from tests.parity.test_tensor_parallel import weights_of

pytestmark = pytest.mark.processes

WORKLOADS = """
from paralab.worker.sharding.split_experts import SplitExperts
from tests.worker.expert_models import *

exchange, sum_gradients = SplitExperts.exchange, SplitExperts.sum_gradients
mistakes = []  # in training, but not in the proof

def is_on(name, split):
    return name in mistakes and hasattr(split.begin, "__self__")

def turn(self, route, sent, unit):
    received = exchange(self, route, sent, unit)
    turned = is_on("other order", self) and len(received) == 1 and unit == "activations"
    return (received[0].flip(0),) if turned else received

def sum_unless(self, begin):
    if not is_on("unsummed", self):
        sum_gradients(self, begin)

SplitExperts.exchange, SplitExperts.sum_gradients = turn, sum_unless

def unsummed():
    mistakes[:] = ["unsummed"]
    return even()

def other_order():
    mistakes[:] = ["other order"]
    return even()
"""
COMMON = ("--workload", "moe:tiny", "--precision", "fp64", "--json")
SAVING = ("--checkpoint", "saved", "--checkpoint-every", "2", "--save-weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ep")
    (folder / "experts.py").write_text(WORKLOADS)
    return folder


@pytest.fixture(scope="module")
def cases(folder):
    """Uneven parts, an idle rank in the last batch of one sample, and accumulation."""
    names = ["moe:tiny", *(f"experts.py:{name}" for name in ("six", "one_rank", "clipped"))]
    names += ["experts.py:unsummed", "experts.py:other_order"]
    options = {
        "accumulate": 2,
        "batch_size": 5,
        "samples": 11,
        "steps": 3,
        "shards": 2,
        "compile": None,
    }
    found = verify(folder, names, "ep", **options)["configurations"]
    return {case["options"]["workload"].rpartition(":")[2]: case for case in found}


@pytest.mark.parametrize("name", ["tiny", "six", "one_rank", "clipped"])
def test_it_trains_like_one_device(cases, name):
    assert cases[name]["equal"]
    assert 0 < cases[name]["max_difference"] <= 1e-10


@pytest.mark.parametrize("name", ["unsummed", "other_order"])
def test_a_mistake_is_caught(cases, name):
    assert not cases[name]["equal"]
    assert cases[name]["max_difference"] > 1e-6


@pytest.fixture(scope="module")
def straight(folder):
    options = ("--steps", "4", "--recompute", "selective", "--accumulate", "2")
    return run_paralab("run", "ep", *COMMON, *SAVING, *options, cwd=folder).json


def test_what_a_rank_sends_and_keeps(straight):
    """Two layers in two accumulation steps: numbers, tokens, and results, and again to recompute
    them; in backward, gradients of tokens and of results."""
    assert straight["all_to_alls_per_step"] == 2 * 2 * (3 + 3 + 2)
    assert straight["all_reduces_per_step"] == 1
    dim, experts, vocabulary, context = 32, 4, 257, 32
    one = 2 * dim * 4 * dim
    block = 4 * dim + 3 * dim * dim + dim * dim + dim + experts * dim
    rest = dim * (vocabulary + context) + 2 * dim + dim * 256 + 256
    own = 8 * (2 * (block + experts // 2 * one) + rest)
    assert [memory["parameters"] for memory in straight["peak_bytes"]] == [own] * 2
    assert [memory["optimizer"] for memory in straight["peak_bytes"]] == [own] * 2


@pytest.mark.parametrize("again", [("ep",), ("single",)])
def test_a_resumed_run_continues_on_the_same_and_on_fewer_ranks(folder, straight, again):
    saved = folder / f"saved-{again[0]}"
    shutil.copytree(folder / "saved", saved, ignore=shutil.ignore_patterns(".in-use"))
    shutil.rmtree(sorted(saved.glob("step-*"))[-1])
    options = ("--steps", "4", "--resume", "--checkpoint", saved.name, "--save-weights")
    resumed = run_paralab("run", *again, *COMMON, *options, cwd=folder).json
    assert resumed["losses"] == pytest.approx(straight["losses"][2:], rel=1e-12)
    ours, theirs = weights_of(folder, resumed), weights_of(folder, straight)
    assert all(ours[name].allclose(theirs[name], atol=1e-12) for name in theirs)
    assert any(name.endswith("experts.up") and len(ours[name]) == 4 for name in ours)
