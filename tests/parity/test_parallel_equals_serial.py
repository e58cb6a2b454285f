"""The master test: every strategy trains like one device; and a strategy that does not is caught
and named."""

import collections
import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_paralab

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """`paralab verify all`: both kinds of workload, all strategies, all combinations, in three
    launches."""
    return run_paralab("verify", "all", "--json", cwd=tmp_path_factory.mktemp("verify")).json


def test_every_case_is_equal_in_fp64(proof):
    assert proof["passed"]
    assert not proof["skipped"]
    assert all(
        case["equal"] and case["max_difference"] <= 1e-10 for case in proof["configurations"]
    )
    # Identical to the last bit everywhere would mean that nothing was split.
    assert any(case["max_difference"] > 0 for case in proof["configurations"])


def test_the_cases_are_those_that_are_promised(proof):
    seen = collections.defaultdict(set)
    for case in proof["configurations"]:
        options = case["options"]
        uneven = "+" in case["arithmetic"]
        seen[case["strategy"]].add(
            (
                options["accumulate"],
                uneven,
                options["varying_weights"],
                options["partial_last_batch"],
            )
        )
    schedules = {
        (case["strategy"], case["options"].get("schedule")) for case in proof["configurations"]
    }
    assert {
        ("pipeline", name) for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")
    } <= schedules
    assert {("hybrid", name) for name in ("1f1b", "zero-bubble")} <= schedules
    for strategy in ("dp", "ddp", "fsdp", "pipeline", "hybrid"):
        every = {
            (a, u, v, p)
            for a in (1, 4)
            for u in (False, True)
            for v in (False, True)
            for p in (False, True)
        }
        assert seen[strategy] == every, strategy
    for strategy in ("single", "mp"):  # nothing is shared out: no split to be uneven
        assert {(a, v, p) for a, _, v, p in seen[strategy]} == {
            (a, v, p) for a in (1, 4) for v in (False, True) for p in (False, True)
        }


def test_fp32_is_equal_relative_to_the_update(tmp_path):
    # Three whole batches, and one of two samples; the other splits are proved in fp64.
    options = ["--accumulate", "4", "--samples", "98", "--replicas", "3", "--micro-batches", "2"]
    found = run_paralab(
        "verify",
        "all",
        "--workload",
        "gpt:tiny",
        "--precision",
        "fp32",
        *options,
        "--json",
        cwd=tmp_path,
    ).json
    assert found["passed"]
    assert all(case["equal"] for case in found["configurations"])
    assert {case["tolerance"] for case in found["configurations"]} == {1e-5}


@pytest.mark.parametrize("example", ["tagger", "huggingface"])
def test_the_examples_are_equal(tmp_path, example):
    if example == "huggingface":
        pytest.importorskip(
            "transformers",
            reason="the example wraps a model of transformers: pip install transformers",
        )
    workload = f"{ROOT}/examples/{example}.py:workload"
    # One pass and other splits are covered by the built-in workloads; four passes, and two samples
    # after three whole batches, are the harder case.
    options = ["--accumulate", "4", "--samples", "98", "--replicas", "2", "--micro-batches", "2"]
    found = run_paralab(
        "verify", "all", "--workload", workload, *options, "--json", cwd=tmp_path
    ).json
    assert all(case["equal"] for case in found["configurations"])
    assert {case["strategy"] for case in found["configurations"]} == {
        "single",
        "dp",
        "ddp",
        "fsdp",
        "mp",
        "pipeline",
        "hybrid",
    }


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
    from paralab.worker.rank_context import RankContext
    RankContext.weighted_loss = lambda self, output, micro: self.workload.loss(output, micro.targets)
    return net()

def one_mistake_in_every_strategy():
    from paralab.worker.strategies import ddp, fsdp
    from paralab.worker.strategies.data_parallel import VirtualDataParallel
    from paralab.worker.strategies.pipeline_processes import PipelineProcesses
    from paralab.worker.strategies.pipeline_threads import PipelineThreads

    def silent(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.reduced.update(map(id, bucket.parameters()))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    scattered = fsdp.TimedReduceScatter.__call__
    def averaging(self, output_tensor, input_tensor, group, op, async_op=False):
        scattered(self, output_tensor, input_tensor, group, op)
        output_tensor /= group.size()

    staged = PipelineThreads.forward_backward
    def dropping(self, passes):
        return staged(self, [micros[:-1] for micros in passes] if self.context.plan.strategy == "pipeline" else passes)

    ddp.timed_all_reduce = silent
    fsdp.TimedReduceScatter.__call__ = averaging
    PipelineThreads.forward_backward = dropping
    PipelineProcesses._sum_over_replicas = lambda self: None
    VirtualDataParallel.reduce = lambda self, used: None
    return net()

def means_of_means():
    from paralab.worker.batches import RankBatch
    def equal_weights(self):
        steps = original(self)
        for step in steps:
            for micro in step:
                micro.share = 1 / (self.context.plan.world_size * sum(map(len, steps)))
        return steps
    original = RankBatch.accumulation_steps
    RankBatch.accumulation_steps = equal_weights
    return net()

def stale_replicas():
    from paralab.worker.strategies.data_parallel import VirtualDataParallel
    VirtualDataParallel._replicate = lambda self: None
    return net()
"""


@pytest.fixture(scope="module")
def caught(tmp_path_factory):
    """One launch in which every strategy that shares out work does it wrongly, each in its own
    way."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken.py").write_text(BROKEN)
    options = [
        "--accumulate",
        "1",
        "--samples",
        "64",
        "--replicas",
        "2",
        "--micro-batches",
        "2",
        "--json",
    ]
    done = run_paralab(
        "verify",
        "all",
        "--workload",
        "broken.py:one_mistake_in_every_strategy",
        *options,
        cwd=folder,
    )
    assert done.code == 1, done.err
    return json.loads(done.out)


@pytest.mark.parametrize(
    ("strategy", "schedule", "cause"),
    [
        ("dp", None, "not added up correctly"),
        ("ddp", None, "missing synchronization: after training, the 2 ranks"),
        ("fsdp", None, "wrong scale: 0.5 ×"),
        ("pipeline", None, "the loss of the first step differs"),
        ("hybrid", None, "missing synchronization"),
        ("hybrid", "1f1b", "missing synchronization"),
        ("single", None, None),
        ("mp", None, None),
        ("pipeline", "1f1b", None),
    ],
)
def test_every_broken_strategy_is_caught_and_named_and_no_other(caught, strategy, schedule, cause):
    assert not caught["passed"]
    chosen = [
        case
        for case in caught["configurations"]
        if (case["strategy"], case["options"].get("schedule")) == (strategy, schedule)
    ]
    assert chosen
    for case in chosen:
        assert case["equal"] == (cause is None), case
        assert (cause or "") in (case["cause"] or "")


@pytest.mark.parametrize(
    ("fault", "strategy", "options", "cause"),
    [
        ("undivided_loss", "single", ["--accumulate", "4"], "wrong scale: 4 ×"),
        ("undivided_loss", "ddp", ["--accumulate", "1", "--replicas", "2"], "wrong scale: 2 ×"),
        ("means_of_means", "ddp", ["--replicas", "3"], "the loss of the first step differs"),
        ("stale_replicas", "dp", ["--replicas", "2"], "the first step is equal; from step 1 on"),
    ],
)
def test_a_broken_strategy_is_caught_and_named(tmp_path: Path, fault, strategy, options, cause):
    (tmp_path / "broken.py").write_text(BROKEN)
    arguments = [
        "verify",
        strategy,
        "--workload",
        f"broken.py:{fault}",
        "--accumulate",
        "1",
        "--samples",
        "64",
        *options,
    ]
    done = run_paralab(*arguments, cwd=tmp_path)
    assert done.code == 1, done.out + done.err
    assert "DIFFERS" in done.out
    assert cause in done.out
