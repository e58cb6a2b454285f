"""Which embeddings and heads tensor parallelism splits by words."""

from dataclasses import replace

import pytest

from paralab.plan.plan import Reasons, Stage
from paralab.plan.request import Request
from paralab.plan.tensor_plan import parallelize_code, require_groups, table_of
from paralab.plan.vocabulary_groups import propose_vocabulary, uneven_words
from paralab.workload.tensor_group import LinearLayer, TensorGroup, TensorPlan, WordTable
from tests.plan.test_resolve import summary

HEAD = LinearLayer("lm.head", 8, 64, 8 * 64 + 64)
TABLE = WordTable("lm.words", 64, 8 * 64)


def groups_of(tables, layers, parameters=2000):
    """Return (columns, row, words, weights) of each group, and the other layers."""
    left = {layer.name: "no linear layer reads its output" for layer in layers}
    groups, left = propose_vocabulary(tables, layers, left, {"lm"}, parameters)
    assert {group.block for group in groups} <= {"lm"}
    return [(g.columns, g.row, g.words, g.weights) for g in groups], left


def test_an_embedding_and_a_head_are_groups():
    assert groups_of([TABLE], [HEAD]) == (
        [((), "lm.words", 64, 512), (("lm.head",), "", 64, 576)],
        {},
    )


def test_tied_weights_are_one_group_and_count_once():
    tied = replace(TABLE, heads=("lm.head",), tied=("lm.head.weight",))
    assert groups_of([tied], [replace(HEAD, shared=True)]) == (
        [(("lm.head",), "lm.words", 64, 576)],
        {},
    )


def test_embeddings_with_the_same_weight_are_one_group():
    one = replace(TABLE, name="lm.one", tables=("lm.two",), tied=("lm.two.weight",))
    two = replace(TABLE, name="lm.two", tables=("lm.one",), tied=("lm.one.weight",))
    [group], left = propose_vocabulary([one, two], [], {}, {"lm"}, 2000)
    assert (group.row, group.more_rows, group.weights) == ("lm.one", ("lm.two",), 512)
    assert group.layers == ("lm.one", "lm.two")
    assert {group.style_of(layer) for layer in group.layers} == {"EmbeddingParallel()"}
    assert left == {}

    _, left = propose_vocabulary([one, replace(two, problem="sparse")], [], {}, {"lm"}, 2000)
    assert left == {"lm.one": "sparse", "lm.two": "sparse"}


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(replace(HEAD, outputs=8), id="not more outputs than inputs"),
        pytest.param(replace(HEAD, shared=True), id="tied to something else"),
        pytest.param(replace(HEAD, transposed=True), id="Conv1D"),
    ],
)
def test_no_head(layer):
    groups, left = groups_of([], [layer])
    assert groups == []
    assert set(left) == {"lm.head"}


def test_a_layer_that_another_layer_reads_is_no_head():
    after = LinearLayer("lm.after", 64, 8, 8 * 64, ("lm.head",))
    assert groups_of([], [HEAD, after])[0] == []


def test_small_or_unsuitable_tables_stay_whole():
    small = WordTable("lm.types", 2, 16)
    unsuitable = WordTable("lm.sparse", 64, 512, problem="its gradients are sparse")
    groups, left = groups_of([small, unsuitable], [])
    assert groups == []
    assert "1%" in left["lm.types"]
    assert left["lm.sparse"] == "its gradients are sparse"


def test_uneven_words_are_refused_with_the_numbers():
    group = TensorGroup("", (), "words", 1, words=50257)
    assert uneven_words(replace(group, words=64), 4) is None
    assert uneven_words(group, 2) == (
        "50257 words cannot be split evenly over 2 shards, but 50258 can"
    )


def test_the_code_ties_the_weights_again():
    tied = TensorGroup(
        "lm", ("lm.head",), "lm.words", 512, words=64, tied=("lm.head.weight",), kept=True
    )
    plan = TensorPlan(2, (tied,), parameters=1024)
    code = parallelize_code(plan)
    assert '    "lm.words": EmbeddingParallel(),' in code
    assert '    "lm.head": ColwiseParallel(output_layouts=Replicate()),' in code
    assert "from torch.distributed.tensor import Replicate" in code
    tie = 'model.get_submodule("lm.head").weight = model.get_parameter("lm.words.weight")'
    assert code[-1] == tie
    [row] = table_of(plan)
    assert (row.columns, row.row, row.kept) == ("head", "words", True)
    assert plan.share == 0.5


def test_a_loss_of_split_logits_needs_a_context_and_one_process_per_shard():
    head = TensorGroup("", ("head",), "", 512, words=64, split_loss=True, kept=True)
    plan = TensorPlan(2, (head,))
    code = parallelize_code(plan)
    assert plan.splits_loss
    assert '    "head": ColwiseParallel(use_local_output=False),' in code
    assert code[-1] == "# with loss_parallel(), implicit_replication():"
    assert "split logits" in table_of(plan)[0].result
    one, other = (Stage(name, (name,), 1, 0.0, 0) for name in ("words", "head"))
    given = summary(tensor_plan=plan)
    for parts, zero, splits in (((), None, True), ((one, other), None, False), ((), 3, False)):
        split = require_groups(Request("hybrid", shards=2, zero=zero), 2, parts, given, Reasons())
        assert split.splits_loss == splits
