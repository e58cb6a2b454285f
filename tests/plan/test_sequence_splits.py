"""Proposals for context parallelism, and its plan."""

import json
from dataclasses import replace

import pytest

from paralab.errors import UsageError
from paralab.machine.precision import Probe
from paralab.plan.plan import Plan, label
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from paralab.plan.sequence_plan import block_table
from paralab.plan.sequence_splits import AttentionCall, ObservedBlock, attempts, chain, unsuitable
from paralab.units import count
from paralab.workload.sequence_plan import SequencePlan, SplitBlock, part_sizes
from tests.plan.test_resolve import CPU, summary

#                  hidden states, rotary,      position ids, attention mask
SHAPES = ((2, 9, 64), (1, 9, 16), (2, 9), (2, 1, 9, 9))
SEEN = ObservedBlock(
    "layers.0",
    SHAPES,
    floating=(True, True, False, False),
    outputs=((2, 9, 64),),
    attention=(AttentionCall(4, 2, 9, 9),),
)


def test_parts_differ_by_one_token_at_most():
    assert part_sizes(33, 2) == [17, 16]
    assert part_sizes(8, 4) == [2, 2, 2, 2]
    assert part_sizes(11, 4) == [3, 3, 3, 2]


def test_tensors_with_tokens_are_cut_and_masks_are_whole():
    first = next(attempts(SEEN))
    assert first.cut == ((0, 1), (1, 1), (2, 1))
    assert first.gathered == ((0, 1),)
    assert (first.arguments, first.attention) == ((4,), 1)


def test_then_one_argument_is_treated_differently():
    rest = [each.cut for each in attempts(SEEN)][1:]
    assert rest == [
        ((0, 1), (1, 1), (2, 1), (3, 3)),  # the mask
        ((0, 1), (2, 1)),
        ((0, 1), (1, 1)),
    ]


def test_a_length_equal_to_another_size_gives_several_attempts():
    """Samples × tokens × features = 9 × 9 × 9: the tokens are usually in the dim before the last."""
    cube = replace(SEEN, arguments=((9, 9, 9),), floating=(True,), outputs=((9, 9, 9),))
    assert [each.cut for each in attempts(cube)] == [((0, 1),), ((0, 0),), ((0, 2),)]
    assert [each.gathered for each in attempts(cube)] == [((0, 1),), ((0, 0),), ((0, 2),)]
    none = replace(SEEN, arguments=((2, 5),), floating=(True,))
    assert list(attempts(none)) == []


@pytest.mark.parametrize(
    ("changes", "shards", "words"),
    [
        ({}, 2, None),
        ({"attention": ()}, 2, "scaled_dot_product_attention"),
        ({"attention": (AttentionCall(6, 6, 9, 9),)}, 4, "6 heads"),
        ({"attention": (AttentionCall(4, 2, 9, 9),)}, 4, "2 heads"),  # of keys
        ({"attention": (AttentionCall(4, 4, 9, 5),)}, 2, "5 and 9"),
        ({"attention": (AttentionCall(0, 0, 9, 9),)}, 2, "no dim"),
        ({"attention": (AttentionCall(8, 8, 7, 7),)}, 4, "7 tokens"),
        ({"draws": True}, 2, "random"),
    ],
)
def test_unsuitable_blocks(changes, shards, words):
    reason = unsuitable(replace(SEEN, **changes), shards)
    assert (reason is None) == (words is None)
    assert (words or "") in (reason or "")


def test_a_block_passes_its_part_to_the_next():
    second = replace(SEEN, name="layers.1", after="layers.0", linked=((0, 0),))
    blocks = [replace(next(attempts(each)), kept=True) for each in (SEEN, second)]
    one, two = chain(blocks, [SEEN, second])
    assert (one.cut, one.gathered) == (blocks[0].cut, ())
    assert (two.after, two.parts, two.cut) == ("layers.0", ((0, 1),), ((1, 1), (2, 1)))
    assert two.gathered == ((0, 1),)
    # A block that is not split needs the whole sequence.
    apart = [replace(blocks[0], kept=False), blocks[1]]
    assert chain(apart, [SEEN, second]) == apart


def cp(plan, **options):
    given = summary(sequence_plan=plan)
    request = Request("cp", **options)
    return resolve(request, CPU, given, lambda name: Probe(True, "tried"), None)


PROVED = SequencePlan(
    2,
    (
        SplitBlock("a.0", (1,), 1, 500, ((0, 1),), kept=True, error=1e-16),
        SplitBlock(
            "a.1", (1,), 1, 500, after="a.0", parts=((0, 1),), gathered=((0, 1),), kept=True
        ),
        SplitBlock("b.0", reason="it does not call attention"),
    ),
    length=33,
)


def test_the_plan_has_every_number():
    plan = cp(PROVED, shards=2, batch_size=10)
    assert [rank.samples_per_step for rank in plan.ranks] == [10, 10]
    assert [rank.shard for rank in plan.ranks] == [0, 1]
    assert label(plan) == "cp · 2 shards"
    reasons = {reason.choice: reason for reason in plan.reasons}
    assert reasons["tokens per rank"].value == "17 + 16"
    assert reasons["all-to-alls"].value == "4"
    assert f"{count(1000)} parameters" in reasons["all-to-alls"].because
    assert "a.0, a.1" in reasons["split blocks"].value
    assert any("17 tokens of 33" in remark for remark in plan.remarks)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert [(row.block, row.blocks, row.kept) for row in block_table(PROVED)] == [
        ("a.*", 2, True),
        ("b.*", 1, False),
    ]


def test_a_model_without_such_blocks_is_refused():
    with pytest.raises(UsageError, match="no repeated blocks") as refused:
        cp(replace(PROVED, problem="it has no repeated blocks"), shards=2)
    assert "tp" in (refused.value.fix or "")
