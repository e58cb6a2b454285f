"""The master test: every strategy trains like a single device, and `verify` catches and names one that
does not."""

import collections
import importlib.util
from contextlib import nullcontext

import pytest

from paralab.analyse.verify import LOSSY
from paralab.launch.processes import can_fork
from paralab.plan.request import STRATEGIES
from tests import forked
from tests.conftest import ROOT, run_paralab
from tests.parity.proofs import passed, verify

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """Run `paralab verify all`: both kinds of workloads, all strategies, all combinations."""
    return verify(tmp_path_factory.mktemp("verify"), [], steps=2)


def test_every_case_is_equal_in_fp64(proof):
    assert proof["passed"]
    skipped = {(case["strategy"], case["options"]["workload"]) for case in proof["skipped"]}
    # These have no attention, or no experts.
    assert skipped == {("cp", "mlp:tiny"), ("ep", "mlp:tiny"), ("ep", "gpt:tiny")}
    assert all(passed(case) and case["max_difference"] <= 1e-10 for case in proof["configurations"])
    # A lossy configuration really trains differently from a single device.
    lossy = [case for case in proof["configurations"] if case["as_simulated"]]
    assert all(case["excused"]["max_difference"] > 1e-8 for case in lossy)
    ways = {tuple(sorted(set(case["options"]) & set(LOSSY))) for case in lossy}
    assert ways == {("compress",), ("sync_every",), ("outer_lr", "outer_momentum", "sync_every")}
    # If everything were bit-for-bit equal, nothing would have been split.
    assert any(case["max_difference"] > 0 for case in proof["configurations"])


def test_every_combination_is_a_case(proof):
    combinations = collections.defaultdict(set)
    for case in proof["configurations"]:
        options = case["options"]
        uneven = "+" in case["arithmetic"]
        combinations[case["strategy"]].add(
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
    grids = {
        (case["options"].get("schedule"), case["options"].get("zero"))
        for case in proof["configurations"]
        if case["strategy"] == "hybrid" and case["options"].get("shards") == 2
    }
    assert grids == {("1f1b", None), (None, None), (None, 3)}  # DP × PP × TP, DP × TP, FSDP × TP
    shardings = {
        (case["options"].get("zero"), case["options"].get("shard_groups"))
        for case in proof["configurations"]
        if case["strategy"] == "fsdp"
    }
    recomputed = {
        (case["strategy"], case["options"]["recompute"])
        for case in proof["configurations"]
        if case["options"].get("recompute")
    }
    assert {strategy for strategy, _ in recomputed} == set(STRATEGIES) - {"ep"}
    assert {mode for _, mode in recomputed} == {"full", "selective"}
    assert shardings == {(None, None), (1, None), (2, None), (None, 2)}
    for strategy in ("dp", "ddp", "fsdp", "pipeline", "hybrid"):
        every = {
            (a, u, v, p)
            for a in (1, 4)
            for u in (False, True)
            for v in (False, True)
            for p in (False, True)
        }
        assert combinations[strategy] == every, strategy
    for strategy in ("single", "tp", "mp"):  # they do not split the batch
        assert {(a, v, p) for a, _, v, p in combinations[strategy]} == {
            (a, v, p) for a in (1, 4) for v in (False, True) for p in (False, True)
        }
    # Only gpt has attention, and its weights vary.
    assert {(a, v, p) for a, _, v, p in combinations["cp"]} == {
        (a, True, p) for a in (1, 4) for p in (False, True)
    }


def test_fp32_is_equal_relative_to_the_update(tmp_path):
    # Two full batches, and one with two samples. The other splits are verified in fp64.
    options = {"accumulate": 4, "samples": 66, "steps": 3, "replicas": 3, "micro_batches": 2}
    found = verify(tmp_path, ["gpt:tiny"], precision="fp32", **options)
    assert found["passed"]
    assert all(passed(case) for case in found["configurations"])
    # Lossy configurations are compared with a simulation, in fp64.
    tolerances = {(case["as_simulated"], case["tolerance"]) for case in found["configurations"]}
    assert tolerances == {(None, 1e-5), (True, 1e-10)}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The cases of all examples, from one launch."""
    names, modules = ["tagger"], []
    if importlib.util.find_spec("transformers"):
        names.append("huggingface")
        modules.append("transformers.models.gpt2.modeling_gpt2")  # 3 s in every process
    paths = [f"{ROOT}/examples/{name}.py:workload" for name in names]
    # The built-in workloads cover other splits. Two samples after a full batch are the hardest.
    options = {"accumulate": 2, "samples": 34, "steps": 2, "replicas": 2, "micro_batches": 2}
    folder = tmp_path_factory.mktemp("examples")
    with forked.server(modules) if can_fork() else nullcontext():
        return verify(folder, paths, **options)["configurations"]


@pytest.mark.parametrize("example", ["tagger", "huggingface"])
def test_the_examples_are_equal(examples, example):
    if example == "huggingface":
        pytest.importorskip("transformers", reason="needs a model: pip install transformers")
    cases = [case for case in examples if example in case["options"]["workload"]]
    assert all(passed(case) for case in cases)
    without = {"ep"} | ({"cp"} if example == "tagger" else set())  # experts, attention
    assert {case["strategy"] for case in cases} == set(STRATEGIES) - without


BROKEN = """
import dataclasses
import torch
import torch.distributed as dist
from torch import nn
from paralab.worker.batches import RankBatch
from paralab.worker.rank_context import RankContext
from paralab.worker.sharding.sharded_units import TimedCollective
from paralab.worker.strategies import ddp, fsdp, hybrid, pipeline_processes
from paralab.worker.strategies.data_parallel import VirtualDataParallel
from paralab.worker.strategies.local_sgd import LocalSgd
from paralab.worker.strategies.pipeline_threads import PipelineThreads
from paralab.worker.strategies.tp import Tp
from paralab.worker.sharding.zero_optimizer import ShardedOptimizer

def net():
    return {
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
        "data": (torch.randn(128, 4), torch.randn(128, 4)),
        "loss": nn.functional.mse_loss,
        "batch_size": 15,  # 8 + 7
    }

def patch(owner, name, broken, workload, strategies):
    "Replace a method, but only in trainings of this workload under these strategies."
    original = getattr(owner, name)
    def method(self, *args, **kwargs):
        plan = (self if isinstance(self, RankContext) else self.context).plan
        if plan.workload.endswith(workload) and plan.strategy in strategies:
            return broken(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)
    setattr(owner, name, method)

def silent(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.reduced.update(map(id, bucket.parameters()))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

def halved(bucket):
    bucket.buffer().div_(2)
    return bucket

def one_mistake_in_every_strategy():
    mine = "one_mistake_in_every_strategy"
    hook, original_wrap = ddp.timed_all_reduce, ddp.wrap
    def wrap(context, *args, **where):
        is_mine, lossy = context.plan.workload.endswith(mine), context.plan.compress
        ddp.timed_all_reduce = silent if is_mine and not lossy else hook
        wrapped, reduction = original_wrap(context, *args, **where)
        if is_mine and lossy == "bf16":
            cast = reduction.compression
            reduce = cast.reduce
            cast.reduce = lambda bucket, begin: reduce(halved(bucket), begin)
        if is_mine and lossy == "powersgd":
            reduction.compression.state.use_error_feedback = False
        return wrapped, reduction
    ddp.wrap = hybrid.wrap = wrap

    def late(original, self, step):
        "Average after step 3 instead of step 2."
        self.lossy = dataclasses.replace(self.lossy, sync_every=3)
        return original(self, step)
    patch(LocalSgd, "finish_step", late, mine, ["local-sgd"])

    def average(original, self, output_tensor, input_tensor, group, **op):
        original(self, output_tensor, input_tensor, group, **op)
        if self.kind == "reduce_scatter":
            output_tensor /= group.size()
    patch(TimedCollective, "__call__", average, mine, ["fsdp", "hybrid"])

    def drop(original, self, steps):
        return original(self, [micros[:-1] for micros in steps])
    patch(PipelineThreads, "forward_backward", drop, mine, ["pipeline"])
    patch(pipeline_processes, "sum_over_replicas", lambda *_: None, mine, ["hybrid"])
    patch(VirtualDataParallel, "reduce", lambda *_: None, mine, ["dp"])

    def every_shard_counts(original, self, steps):
        self.context.rank = dataclasses.replace(self.context.rank, shard=0)
        return original(self, steps)
    patch(Tp, "forward_backward", every_shard_counts, mine, ["tp"])
    return net()

def another_mistake():
    mine = "another_mistake"
    def undivided(original, self, output, micro):
        return original(self, output, micro) * self.plan.accumulate
    patch(RankContext, "weighted_loss", undivided, mine, ["single"])

    def means_of_means(original, self):
        steps = original(self)
        for step in steps:
            for micro in step:
                micro.share = 1 / (self.context.plan.world_size * sum(map(len, steps)))
        return steps
    patch(RankBatch, "accumulation_steps", means_of_means, mine, ["ddp"])
    patch(VirtualDataParallel, "_replicate", lambda *_: None, mine, ["dp"])
    patch(ShardedOptimizer, "_sync_params", lambda *_: None, mine, ["fsdp"])

    def unweighted(original, self):
        "8 and 7 samples count equally."
        self.weight = 1.0
        return original(self)
    patch(LocalSgd, "synchronize", unweighted, mine, ["local-sgd"])

    def unsharded(original, self, steps):
        "Shard 1 has another gradient for a bias that is not split."
        loss = original(self, steps)
        self.model[2].bias.grad *= 1 + self.context.rank.shard
        return loss
    patch(Tp, "forward_backward", unsharded, mine, ["tp"])
    return net()

def groups_on_their_own():
    grid = fsdp.replica_mesh
    def only_parts(plan, rank):
        mine = plan.workload.endswith("groups_on_their_own")
        return grid(plan, rank)["parts"] if mine else grid(plan, rank)
    fsdp.replica_mesh = only_parts
    return net()
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """One launch verifies two workloads, in which each strategy makes a different mistake."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken.py").write_text(BROKEN)
    names = ["broken.py:one_mistake_in_every_strategy", "broken.py:another_mistake"]
    options = {"accumulate": 2, "samples": 60, "replicas": 2, "micro_batches": 2}
    return verify(folder, names, **options)


OPTIONS = ("zero", "schedule", "compress")
ONE, OTHER = "one_mistake_in_every_strategy", "another_mistake"


@pytest.mark.parametrize(
    ("workload", "strategy", "option", "cause"),
    [
        (ONE, "dp", None, "added up"),
        (ONE, "ddp", None, "synchronization"),
        (ONE, "ddp", "bf16", "0.5 ×"),
        (ONE, "ddp", "powersgd", "losses of all 4 steps"),  # without error feedback
        (ONE, "local-sgd", None, "from step"),  # averages one step late
        (ONE, "fsdp", None, "0.5 ×"),
        (ONE, "fsdp", 1, "added up"),
        (ONE, "fsdp", 2, "0.5 ×"),
        (ONE, "tp", None, "counted 2 times"),
        (ONE, "pipeline", None, "first step's loss"),
        (ONE, "hybrid", None, "synchronization"),
        (ONE, "hybrid", "1f1b", "synchronization"),
        (ONE, "single", None, None),
        (ONE, "mp", None, None),
        (ONE, "pipeline", "1f1b", None),
        (OTHER, "single", None, "2 ×"),  # each accumulation step counts as a full batch
        (OTHER, "dp", None, "from step 1"),  # replicas keep their initial weights
        (OTHER, "ddp", None, "first step's loss"),  # a mean of means
        (OTHER, "local-sgd", None, "from step"),  # a mean of means
        (OTHER, "fsdp", None, None),
        (OTHER, "fsdp", 1, "synchronization"),  # each rank keeps its own updates
        (OTHER, "tp", None, "added up"),
        (OTHER, "hybrid", None, None),
    ],
)
def test_every_mistake_is_caught_and_named(broken, workload, strategy, option, cause):
    assert not broken["passed"]
    chosen = [
        case
        for case in broken["configurations"]
        if case["options"]["workload"].endswith(workload)
        and case["strategy"] == strategy
        and next(filter(None, map(case["options"].get, OPTIONS)), None) == option
    ]
    assert chosen
    for case in chosen:
        assert case["equal"] == (cause is None), case
        assert (cause or "") in (case["cause"] or "")


def test_shard_groups_that_do_not_reduce_are_caught(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    options = {"accumulate": 1, "samples": 30, "replicas": 4, "shard_groups": 2}
    proof = verify(tmp_path, ["broken.py:groups_on_their_own", "broken.py:net"], "fsdp", **options)
    wrong, right = proof["configurations"]
    assert right["equal"]
    assert not wrong["equal"]
    assert "synchronization" in wrong["cause"]


def test_sharded_stages_that_average_are_caught(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    grid = {"replicas": 2, "stages": 2, "zero": 3, "micro_batches": 2, "compile": None}
    options = {"accumulate": 1, "samples": 30, **grid}
    [wrong] = verify(tmp_path, [f"broken.py:{ONE}"], "hybrid", **options)["configurations"]
    assert not wrong["equal"]
    assert "0.5 ×" in wrong["cause"]


def test_the_command_fails_if_a_strategy_is_wrong(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    options = ["--workload", "broken.py:another_mistake", "--accumulate", "2", "--samples", "60"]
    done = run_paralab("verify", "single", *options, cwd=tmp_path)
    assert done.code == 1, done.out + done.err
    assert "2 ×" in done.out
