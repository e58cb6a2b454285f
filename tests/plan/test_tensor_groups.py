"""Which linear layers tensor parallelism groups, and how it may try to split a group."""

from dataclasses import replace

import pytest

from paralab.errors import UsageError
from paralab.plan.plan import Reasons
from paralab.plan.request import Request
from paralab.plan.tensor_groups import attempts, enclosing, propose, uneven
from paralab.plan.tensor_plan import parallelize_code, remark_on, require_groups, table_of
from paralab.workload.tensor_group import LinearLayer, TensorGroup, TensorPlan
from tests.plan.test_resolve import summary


def layer(name, *reads, inputs=8, outputs=8, **more):
    return LinearLayer(name, inputs, outputs, inputs * outputs, reads, **more)


def groups_of(*layers, called=()):
    """Return (columns, row) of each group, and the other layers."""
    groups, left = propose(layers, called)
    return [(group.columns, group.row) for group in groups], set(left)


BLOCK = (
    layer("b.attn.q"),
    layer("b.attn.k"),
    layer("b.attn.v"),
    layer("b.attn.o", "b.attn.q", "b.attn.k", "b.attn.v"),
    # The residual connection: both read the attention's output.
    layer("b.mlp.gate", "b.attn.o"),
    layer("b.mlp.up", "b.attn.o"),
    layer("b.mlp.down", "b.mlp.gate", "b.mlp.up"),
    layer("head", "b.attn.o", "b.mlp.down"),
)


def test_attention_and_a_gated_feed_forward():
    assert groups_of(*BLOCK) == (
        [
            (("b.attn.q", "b.attn.k", "b.attn.v"), "b.attn.o"),
            (("b.mlp.gate", "b.mlp.up"), "b.mlp.down"),
        ],
        {"head"},
    )


def test_a_chain_alternates_columns_and_rows():
    chain = (layer("a"), layer("b", "a"), layer("c", "b"), layer("d", "c"), layer("e", "d"))
    assert groups_of(*chain) == ([(("a",), "b"), (("c",), "d")], {"e"})


def test_layers_of_a_failed_group_may_be_in_another_group():
    """A VAE returns the outputs of `mu`, so mu | hidden is not possible, but hidden | out is. The
    first version paired layers only once, and refused the model."""
    layers = [layer("mu"), layer("hidden", "mu"), layer("out", "hidden"), layer("last", "out")]
    first, _ = propose(layers, ())
    assert [group.layers for group in first] == [("mu", "hidden"), ("out", "last")]
    tried = [replace(first[0], kept=False), replace(first[1], kept=True)]
    assert propose(layers, (), tried)[0] == []
    tried = [replace(group, kept=False) for group in first]
    again, left = propose(layers, (), tried)
    assert [group.layers for group in again] == [("hidden", "out")]
    assert left == {}
    assert propose(layers, (), [*tried, replace(again[0], kept=True)])[0] == []


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((layer("a"), layer("b", "a"), layer("c", "a")), id="two layers read a"),
        pytest.param((layer("a", "a"),), id="a layer that is called twice reads itself"),
        pytest.param((layer("a"), layer("b", "a", shared=True)), id="tied weights"),
        pytest.param((layer("a", shared=True), layer("b", "a")), id="tied weights of a column"),
        pytest.param((), id="no linear layer"),
    ],
)
def test_no_group(layers):
    assert groups_of(*layers) == ([], {each.name for each in layers})


def test_an_attention_module_is_a_group_by_itself():
    """Its output projection's bias (8) is not split."""
    attention = LinearLayer("b.attn", 8, 8, 4 * 64 + 4 * 8, heads=4)
    [group], _ = propose([attention], {"b"})
    assert (group.block, group.columns, group.row) == ("b", ("b.attn",), "b.attn")
    assert group.weights == 4 * 64 + 3 * 8
    assert list(attempts(group, {"b.attn": attention}, (), 2)) == [group]
    assert list(attempts(group, {"b.attn": attention}, (), 3)) == []
    assert "4 heads" in uneven(group, {"b.attn": attention}, (), 3)


def test_only_weights_that_are_split_count():
    [group], _ = propose([layer("a", outputs=32), layer("b", "a", inputs=32)], ())
    assert group.weights == 8 * 32 + 32 * 8
    biased = replace(layer("b", "a", inputs=32), parameters=32 * 8 + 8)  # a row's bias is whole
    [group], _ = propose([layer("a", outputs=32), biased], ())
    assert group.weights == 8 * 32 + 32 * 8


def test_the_block_is_the_innermost_called_module_around_the_layers():
    called = {"layers.0", "layers.0.attn", "layers.1"}
    assert enclosing(["layers.0.attn.self.q", "layers.0.attn.o"], called) == "layers.0.attn"
    assert enclosing(["layers.0.attn.q", "layers.0.mlp"], called) == "layers.0"
    assert enclosing(["layers.0.a", "layers.1.b"], called) == ""  # a ModuleList is not called


def ways(group, attributes, shards=2, **widths):
    """Return (parts, attributes to divide, whether it uses our own style) of each attempt."""
    layers = {name: layer(name, outputs=width) for name, width in widths.items()}
    tried = attempts(group, layers, tuple(attributes.items()), shards)
    return [(each.parts, each.divided, each.own_style) for each in tried]


def test_plain_sharding_comes_first_then_likely_attributes():
    group = TensorGroup("attn", ("q", "k"), "o", 1)
    tried = ways(
        group, {"attn.heads": 4, "attn.head_dim": 8, "attn.dim": 32, "attn.odd": 3}, q=32, k=32
    )
    assert tried[:2] == [(1, (), False), (1, (), True)]
    assert tried[2] == (1, (("attn.heads", 2),), False)  # a number of heads, but not their size
    assert tried[3] == (1, (("attn.dim", 16),), False)  # as wide as the columns
    assert tried[4] == (1, (("attn.dim", 16), ("attn.heads", 2)), False)
    assert not any("odd" in name for _, divided, _ in tried for name, _ in divided)


def test_one_column_layer_may_be_several_matrices():
    group = TensorGroup("attn", ("qkv",), "o", 1, own_style=True)  # a Conv1D
    assert ways(group, {}, qkv=96) == [(1, (), True), (3, (), True), (2, (), True)]
    assert ways(group, {}, qkv=32) == [(1, (), True), (2, (), True)]  # 32 is not 3 × 2 × n
    assert ways(group, {}, shards=5, qkv=96) == []


@pytest.mark.parametrize("attribute", [("attn.num_heads", 12), ("attn.head_dim", 64)])
def test_uneven_heads_are_refused_with_the_numbers(attribute):
    group = TensorGroup("attn", ("qkv",), "o", 1)
    layers = {"qkv": layer("qkv", outputs=3 * 768), "o": layer("o", inputs=768)}
    assert uneven(group, layers, (attribute,), 4) is None
    problem = uneven(group, layers, (attribute,), 5)
    assert problem == "12 heads cannot be split over 5 shards, only over 2, 3, 4, 6, 12"
    assert "2304 outputs" in uneven(group, layers, (), 5)


def test_fewer_heads_of_keys_than_of_queries():
    group = TensorGroup("attn", ("q", "k", "v"), "o", 1)
    wide, narrow = {"outputs": 256}, {"outputs": 64}
    layers = {"q": layer("q", **wide), "k": layer("k", **narrow), "v": layer("v", **narrow)}
    layers["o"] = layer("o", inputs=256)
    assert "2 heads" in uneven(group, layers, (("attn.head_dim", 32),), 4)


def tensor_plan(**changes):
    attention = TensorGroup(
        "h.0", ("h.0.qkv",), "h.0.o", 60, 3, (("h.0.width", 16),), kept=True, error=1e-16
    )
    more = replace(attention, block="h.1", columns=("h.1.qkv",), row="h.1.o", error=3e-16)
    failed = TensorGroup("mlp", ("mlp.a",), "mlp.b", 20, reason="it differs")
    plan = TensorPlan(2, (attention, more, failed), (("head", "nothing reads it"),), 200)
    return replace(plan, **changes)


def test_equal_groups_of_different_layers_are_one_row():
    qkv, mlp = table_of(tensor_plan())
    assert (qkv.block, qkv.groups, qkv.parameters, qkv.kept) == ("h.*", 2, 120, True)
    assert "3e-16" in qkv.result
    assert (mlp.block, mlp.columns, mlp.row, mlp.kept, mlp.result) == (
        "mlp",
        "a",
        "b",
        False,
        "it differs",
    )


def test_the_code_has_only_kept_groups():
    code = parallelize_code(tensor_plan())
    assert code[:2] == [
        "from paralab.worker.sharding.sharded_layers import MatrixParallel",
        "from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module",
    ]
    assert code[2] == 'model.get_submodule("h.0").width = 16'
    assert '    "h.1.qkv": MatrixParallel(3),' in code
    assert '    "h.1.o": RowwiseParallel(),' in code
    assert not any("mlp" in line for line in code)


def test_the_share_of_split_parameters():
    assert tensor_plan().share == 0.6
    reasons = Reasons()
    require_groups(Request("tp"), 2, (), summary(tensor_plan=tensor_plan()), reasons)
    [reason] = reasons
    [remark] = remark_on(tensor_plan())
    assert "60%" in remark
    assert remark_on(None) == ()
    assert reason.value == "2 of 3 groups (60%)"


def test_a_plan_with_a_problem_is_refused():
    broken = summary(tensor_plan=tensor_plan(problem="no group"))
    with pytest.raises(UsageError, match="no group"):
        require_groups(Request("tp"), 2, (), broken, Reasons())
    assert require_groups(Request("ddp"), 2, (), broken, Reasons()) is None
