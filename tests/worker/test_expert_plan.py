"""Which experts `ep` divides, and that its proof rejects mistakes."""

import json
import subprocess

import pytest

from paralab.launch.processes import can_fork
from tests import forked
from tests.conftest import ROOT

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks():
    """Run expert_ranks.py on two ranks, and return its results."""
    pytest.importorskip("transformers", reason="needs models: pip install transformers")
    if not can_fork():
        pytest.skip("needs processes that fork, on Linux without an NVIDIA driver")
    words = [*forked.python(2), "tests/worker/expert_ranks.py"]
    done = subprocess.run(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]
    [answer] = [line for line in done.stdout.splitlines() if line.startswith('{"models"')]
    return json.loads(answer)


RIGHT = ("even", "six", "one_expert", "one_rank", "flat", "dropout", "clipped", "adamw")


@pytest.mark.parametrize("name", [*RIGHT, "moe:tiny", "mixtral"])
def test_these_are_divided(ranks, name):
    assert ranks["models"][name] == {"divided": 2, "problem": None}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("three", "3 experts of blocks.0.experts cannot be divided among 2 shards"),
        ("capacity", "do not add up"),  # which tokens are dropped depends on the batch
        ("balanced", "do not add up"),  # the loss would use the statistics of each rank's tokens
        ("outside", "outside 0 … 3"),
        ("separate", "no expert layer"),
    ],
)
def test_these_are_refused_and_the_reason_is_named(ranks, name, words):
    assert words in ranks["models"][name]["problem"]


@pytest.mark.parametrize(
    ("mistake", "differs"),
    [
        ("experts averaged", "gradient of blocks.0.experts.up"),
        ("other order", "gradient of head.weight"),  # results go to other tokens
        ("dropped", "gradient of head.weight"),
        ("weights without gradient", "gradient of blocks.0.gate.weight"),
        ("other ranks", "gradient of head.weight"),  # tokens go to other experts
        ("others not summed", "gradient of head.weight"),
    ],
)
def test_a_mistake_is_found_by_the_proof(ranks, mistake, differs):
    assert f"{differs} differs by" in ranks["mistakes"][mistake]
