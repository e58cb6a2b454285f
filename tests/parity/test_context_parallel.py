"""Context parallelism: dropout, uneven parts, checkpoints, all-to-alls, and a mistake that is caught."""

import json
import shutil

import pytest

from tests.conftest import run_paralab
from tests.parity.test_tensor_parallel import DROPOUT, weights_of

pytestmark = pytest.mark.processes

# Nine tokens: five on one rank and four on the other.
WORKLOADS = (
    DROPOUT.replace("32, 6, 16", "32, 9, 16")
    + """
def unsummed():
    "Each rank keeps the gradients of its own tokens."
    from paralab.worker.sharding.split_sequence import SplitSequence
    init = SplitSequence.__init__
    def broken(self, model, blocks, group, *more):
        init(self, model, blocks, group, *more)
        if group is not None:  # not in the proof
            self.parameters = []
    SplitSequence.__init__ = broken
    return workload()
"""
)
COMMON = ("--workload", "block.py:workload", "--precision", "fp64", "--steps", "4", "--json")
SAVING = ("--checkpoint", "saved", "--checkpoint-every", "2", "--save-weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cp")
    (folder / "block.py").write_text(WORKLOADS)
    return folder


@pytest.fixture(scope="module")
def straight(folder):
    return run_paralab("run", "cp", *COMMON, *SAVING, "--accumulate", "2", cwd=folder).json


def test_what_a_rank_sends_and_keeps(straight):
    """Two blocks in two accumulation steps: an all-to-all before and after attention, forward and
    backward. The parts are put together once, forward, and the gradient of the data is not needed."""
    assert straight["all_to_alls_per_step"] == 2 * 2 * 4
    assert straight["all_gathers_per_step"] == 2
    assert straight["all_reduces_per_step"] == 1
    weights = 2 * (2 * 16 + 16 * 48 + 48 + 16 * 16 + 16) + 16 * 16 + 16
    assert [memory["parameters"] for memory in straight["peak_bytes"]] == [8 * weights] * 2
    larger, smaller = (memory["activations"] for memory in straight["peak_bytes"])
    assert smaller < larger


def test_a_resumed_run_repeats_the_interrupted_one_with_dropout(folder, straight):
    """Bit for bit: the random numbers of each part follow from the common ones."""
    steps = sorted((folder / "saved").glob("step-*"))
    shutil.rmtree(steps[-1])
    again = ("--resume", "--accumulate", "2")
    resumed = run_paralab("run", "cp", *COMMON, *SAVING, *again, cwd=folder).json
    assert resumed["losses"] == straight["losses"][2:]
    ours, theirs = weights_of(folder, resumed), weights_of(folder, straight)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_gradients_that_are_not_summed_are_caught(folder):
    options = ("--shards", "2", "--accumulate", "2", "--samples", "10", "--steps", "2", "--json")
    done = run_paralab("verify", "cp", "--workload", "block.py:unsummed", *options, cwd=folder)
    assert done.code == 1
    [wrong] = json.loads(done.out)["configurations"]
    assert not wrong["equal"]
    assert "added up" in wrong["cause"]
