"""What fsdp shards, and which repeated blocks are recomputed or compiled."""

import pytest

from paralab.errors import UsageError
from paralab.plan.plan import Reasons, Stage
from paralab.plan.recompute import choose_recomputed
from paralab.plan.request import Request
from paralab.workload.summary import Block, Unit
from tests.plan.test_resolve import plan, summary


def test_zero_decides_what_must_be_cut():
    def stage_of(made):
        return [reason.value for reason in made.reasons if reason.choice == "ZeRO stage"]

    units = (Unit("block", 1000),)
    plans = [plan("fsdp", of=summary(units=units), zero=zero) for zero in (1, 2, None)]
    assert [made.zero for made in plans] == [1, 2, 3]
    assert [stage_of(made) for made in plans] == [["1"], ["2"], ["3"]]
    assert [made.shards_per_parameter for made in plans] == [1, 2, 2]
    assert [made.shard_units for made in plans] == [(), ("block",), ("block",)]
    assert [made.ranks[0].devices[0].role for made in plans] == ["replica", "shard", "shard"]

    assert plan("fsdp", replicas=4, shard_groups=2).shards_per_parameter == 2
    # Whole parameters stay together, but not all parameters.
    assert plan("fsdp", of=summary(scalars=("scale",), whole_tensors=True), zero=1).zero == 1
    with pytest.raises(UsageError, match="--zero 1") as refused:
        plan("fsdp", of=summary(whole_model=True), zero=1)
    assert "ddp" in refused.value.fix
    two = summary(dtypes=("bfloat16", "float32"))  # in fp64, both become float64
    with pytest.raises(UsageError, match="bfloat16 and float32"):
        plan("fsdp", of=two, zero=1)
    assert plan("fsdp", of=two, zero=2).zero == 2
    assert plan("fsdp", of=two, zero=1, precision="fp64").zero == 1
    assert plan("fsdp", of=summary(unused=("spare",)), zero=1).find_unused
    assert not plan("fsdp", of=summary(unused=("spare",))).find_unused


def test_the_plan_names_the_blocks_that_are_recomputed_and_why_others_are_not():
    both = ("full", "selective")
    blocks = (Block("a", both), Block("b", ()), Block("layer1", both), Block("c", ("full",)))
    found = plan("ddp", of=summary(blocks=blocks), recompute="selective")
    assert (found.recompute, found.recomputed) == ("selective", ("a", "layer1"))
    [reason] = [reason for reason in found.reasons if reason.choice == "recompute"]
    assert reason.value == "selective: 2 blocks (a, layer1)"
    assert "not 2 blocks (b, c)" in reason.because
    assert plan("ddp", of=summary(blocks=blocks), recompute="full").recomputed == (
        *("a", "layer1", "c"),
    )
    assert plan("ddp", of=summary(blocks=blocks)).recomputed == ()

    # Threads share Python's generator.
    draws = (Block("a", both), Block("b", both, python_random=True))
    for strategy, names in {"dp": ("a",), "pipeline": ("a",), "ddp": ("a", "b")}.items():
        assert plan(strategy, of=summary(blocks=draws), recompute="full").recomputed == names

    for none in ((), (Block("b", ()),)):
        with pytest.raises(UsageError, match="--recompute full") as refused:
            plan("single", of=summary(blocks=none), recompute="full")
        assert "leave out --recompute" in refused.value.fix
    with pytest.raises(UsageError) as refused:
        plan("single", of=summary(blocks=(Block("c", ("full",)),)), recompute="selective")
    assert "--recompute full" in refused.value.fix


def test_compiling_needs_blocks_a_compiler_and_a_forward_that_repeats(monkeypatch):
    blocks = (Block("a", ()), Block("b", ()))
    monkeypatch.setattr("shutil.which", lambda command: f"/bin/{command}")
    found = plan("ddp", of=summary(blocks=blocks, dropout=True), compile=True)
    assert (found.compile, found.compiled) == (True, ("a", "b"))
    assert any("compiled" in difference for difference in found.differences)
    assert plan("ddp", of=summary(blocks=blocks)).compiled == ()

    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda command: None)
    wrong = [{}, {"blocks": blocks, "random": True}, {"blocks": blocks, "state": ("seen",)}]
    for facts, part in zip(
        [*wrong, {"blocks": blocks}],
        ["no repeated blocks", "random", "state", "'no-such-compiler'"],
        strict=True,
    ):
        with pytest.raises(UsageError, match=part) as refused:
            plan("single", of=summary(**facts), compile=True)
        assert "leave out --compile" in refused.value.fix


def test_a_block_in_which_a_stage_begins_is_not_recomputed():
    layers = ("blocks.0", "blocks.1.mix", "blocks.2")
    blocks = tuple(Block(f"blocks.{number}", ("full",)) for number in range(3))
    stages = tuple(Stage(name, (name,), 1, 1.0, 8) for name in layers)
    reasons = Reasons()
    request = Request("mp", recompute="full")
    assert choose_recomputed(request, summary(blocks=blocks), stages, reasons) == (
        *("blocks.0", "blocks.2"),
    )
    assert "blocks.1" in reasons[0].because
