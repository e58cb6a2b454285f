"""The master test: every strategy trains like one device; and a strategy that does not is caught and named."""

import collections
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_paralab


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """`paralab verify all`: both kinds of workload, all strategies, all combinations, in three launches."""
    return run_paralab("verify", "all", "--json", cwd=tmp_path_factory.mktemp("verify")).json


def test_every_case_is_equal_in_fp64(proof):
    assert proof["passed"]
    assert not proof["skipped"]
    assert all(case["equal"] and case["max_difference"] <= 1e-10 for case in proof["cases"])
    # Identical to the last bit everywhere would mean that nothing was split.
    assert any(case["max_difference"] > 0 for case in proof["cases"])


def test_the_cases_are_those_that_are_promised(proof):
    seen = collections.defaultdict(set)
    for case in proof["cases"]:
        options = case["options"]
        uneven = "+" in case["arithmetic"]
        seen[case["strategy"]].add((options["accumulate"], uneven, options["varying_weights"], options["partial_last_batch"]))
    schedules = {(case["strategy"], case["options"].get("schedule")) for case in proof["cases"]}
    assert {("pipeline", name) for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")} <= schedules
    assert {("hybrid", name) for name in ("1f1b", "zero-bubble")} <= schedules
    for strategy in ("dp", "ddp", "fsdp", "pipeline", "hybrid"):
        every = {(a, u, v, p) for a in (1, 4) for u in (False, True) for v in (False, True) for p in (False, True)}
        assert seen[strategy] == every, strategy
    for strategy in ("single", "mp"):  # nothing is shared out: no split to be uneven
        assert {(a, v, p) for a, _, v, p in seen[strategy]} == {
            (a, v, p) for a in (1, 4) for v in (False, True) for p in (False, True)
        }


def test_fp32_is_equal_relative_to_the_update(tmp_path):
    found = run_paralab("verify", "all", "--precision", "fp32", "--accumulate", "4", "--json", cwd=tmp_path).json
    assert found["passed"]
    assert all(case["equal"] for case in found["cases"])
    assert {case["tolerance"] for case in found["cases"]} == {1e-5}


@pytest.mark.parametrize("example", ["tagger", "huggingface"])
def test_the_examples_are_equal(tmp_path, example):
    if example == "huggingface":
        pytest.importorskip("transformers", reason="the example wraps a model of transformers: pip install transformers")
    workload = f"{ROOT}/examples/{example}.py:workload"
    # One pass is covered by the built-in workloads; four passes are the harder case. A GPT-2 takes long: one split is enough.
    options = ["--accumulate", "4", *(["--replicas", "2", "--micro-batches", "2"] if example == "huggingface" else [])]
    found = run_paralab("verify", "all", "--workload", workload, *options, "--json", cwd=tmp_path).json
    assert all(case["equal"] for case in found["cases"])
    assert {case["strategy"] for case in found["cases"]} == {"single", "dp", "ddp", "fsdp", "mp", "pipeline", "hybrid"}


def test_batchnorm_is_not_called_equal_and_its_cause_is_said(tmp_path):
    found = run_paralab(
        "verify", "all", "--workload", "cnn:tiny", "--samples", "96", "--accumulate", "1", "--json", cwd=tmp_path
    ).json
    assert found["passed"]  # nothing that should be equal differs
    split = [case for case in found["cases"] if case["strategy"] not in ("single", "mp")]
    whole = [case for case in found["cases"] if case not in split]
    assert all(case["equal"] for case in whole)
    assert all(not case["equal"] and case["legitimate"] and "BatchNorm" in case["cause"] for case in split)
    assert all(case["max_difference"] > 1e-6 for case in split)


BROKEN = """
import torch
import torch.distributed as dist
from torch import nn

def net():
    return {
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
        "data": (torch.randn(128, 4), torch.randn(128, 4)),
        "loss": nn.functional.mse_loss,
        "batch_size": 16,
    }

def undivided_loss():
    from paralab.worker.job import Job
    Job.weighted_loss = lambda self, output, micro: self.workload.loss(output, micro.targets)
    return net()

def missing_synchronisation():
    from paralab.worker import ddp
    def silent(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    ddp.timed_all_reduce = silent
    return net()

def averaged_shards():
    from paralab.worker import fsdp
    whole = fsdp.TimedReduceScatter.__call__
    def averaging(self, output_tensor, input_tensor, group, op, async_op=False):
        whole(self, output_tensor, input_tensor, group, op)
        output_tensor /= group.size()
    fsdp.TimedReduceScatter.__call__ = averaging
    return net()

def dropped_micro_batch():
    from paralab.worker.stages import Staged
    whole = Staged.forward_backward
    Staged.forward_backward = lambda self, passes: whole(self, [micros[:-1] for micros in passes])
    return net()

def unsummed_stages():
    from paralab.worker.scheduled import Scheduled
    Scheduled._sum_over_replicas = lambda self: None
    return net()

def replicas_forgotten():
    from paralab.worker.data_parallel import VirtualDataParallel
    VirtualDataParallel.reduce = lambda self, used: None
    return net()

def means_of_means():
    from paralab.worker.loop import Prepared
    def equal_say(self):
        passes = whole(self)
        for micros in passes:
            for micro in micros:
                micro.share = 1 / (self.job.plan.world_size * sum(map(len, passes)))
        return passes
    whole = Prepared.passes
    Prepared.passes = equal_say
    return net()

def stale_replicas():
    from paralab.worker.data_parallel import VirtualDataParallel
    VirtualDataParallel._replicate = lambda self: None
    return net()
"""


@pytest.mark.parametrize(
    ("fault", "strategy", "options", "cause"),
    [
        ("undivided_loss", "single", ["--accumulate", "4"], "wrong scale: 4 ×"),
        ("undivided_loss", "ddp", ["--accumulate", "1", "--replicas", "2"], "wrong scale: 2 ×"),
        ("missing_synchronisation", "ddp", ["--replicas", "2"], "missing synchronisation: after training, the 2 ranks"),
        ("missing_synchronisation", "hybrid", ["--micro-batches", "2"], "missing synchronisation"),
        ("averaged_shards", "fsdp", ["--replicas", "2"], "wrong scale: 0.5 ×"),
        ("dropped_micro_batch", "pipeline", ["--micro-batches", "3"], "the loss of the first step differs"),
        ("unsummed_stages", "hybrid", ["--micro-batches", "2", "--schedule", "1f1b"], "missing synchronisation"),
        ("replicas_forgotten", "dp", ["--replicas", "2"], "not added up correctly"),
        ("means_of_means", "ddp", ["--replicas", "3"], "the loss of the first step differs"),
        ("stale_replicas", "dp", ["--replicas", "2"], "the first step is equal; from step 1 on"),
    ],
)
def test_a_broken_strategy_is_caught_and_named(tmp_path: Path, fault, strategy, options, cause):
    (tmp_path / "broken.py").write_text(BROKEN)
    arguments = ["verify", strategy, "--workload", f"broken.py:{fault}", "--accumulate", "1", "--samples", "64", *options]
    done = run_paralab(*arguments, cwd=tmp_path)
    assert done.code == 1, done.out + done.err
    assert "WRONG" in done.out
    assert cause in done.out
