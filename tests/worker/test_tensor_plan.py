"""What tensor and context parallelism split in each family of models, and that their proofs reject
wrong plans."""

import json
import subprocess

import pytest

from paralab.launch.processes import can_fork
from tests import forked
from tests.conftest import ROOT

pytestmark = pytest.mark.processes
PAGES = ROOT / "docs" / "strategies"


@pytest.fixture(scope="module")
def ranks():
    """Run tensor_ranks.py on two ranks, and return its results."""
    pytest.importorskip("transformers", reason="needs models: pip install transformers")
    if not can_fork():
        pytest.skip("needs processes that fork, on Linux without an NVIDIA driver")
    words = [*forked.python(2), "tests/worker/tensor_ranks.py"]
    done = subprocess.run(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]
    [answer] = [line for line in done.stdout.splitlines() if line.startswith('{"rows"')]
    return json.loads(answer)


def test_the_table_of_families_is_what_the_proof_says(ranks):
    table = [line for line in (PAGES / "tp.md").read_text().splitlines() if line.startswith("| ")]
    assert [row for row in ranks["rows"] if row not in table] == []
    assert len(ranks["rows"]) == 18
    whole = [row for row in ranks["rows"] if row.endswith("| – |")]
    assert len(whole) == 15


def test_the_table_of_split_tokens_is_what_the_proof_says(ranks):
    table = [line for line in (PAGES / "tp.md").read_text().splitlines() if line.startswith("| ")]
    assert [row for row in ranks["tokens"]["rows"] if row not in table] == []
    assert sum("| 2 of 2 |" in row for row in ranks["tokens"]["rows"]) == 4


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("no sum of rows", "differs by"),
        ("no sum of input gradients", "gradient of"),
        ("no sum of gradients", "gradient of"),  # of a norm, from this shard's tokens
        ("not joined", ""),
    ],
)
def test_a_wrong_way_to_split_tokens_is_rejected(ranks, mistake, named):
    right, wrong = ranks["tokens"]["plans"]["right"], ranks["tokens"]["plans"][mistake]
    assert right["problem"] is None
    assert [block["kept"] for block in right["blocks"]] == [True] * 3
    assert not any(block["kept"] for block in wrong["blocks"])
    assert named in wrong["problem"]


def test_another_sequence_as_long_as_a_part_is_not_joined(ranks):
    assert ranks["tokens"]["joined"] == [12, 6, 12]


def test_the_right_groups_are_equal(ranks):
    for name in ("right", "right again"):
        assert ranks["wrong"][name]["kept"]
        assert 0 < ranks["wrong"][name]["error"] < 1e-14


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("swapped", "reduction dim"),  # rows and columns
        ("wrong row", "shapes cannot be multiplied"),
        ("undivided", "not enough values"),  # the attribute that qkv is split by
        ("one matrix", "gradient of query_key_value.weight"),  # q, k, and v side by side
        ("no sum of rows", "output 0.0"),
        ("no sum of input gradients", "gradient of input 0.0"),
        ("unsummed", "gradient of q_norm.weight"),  # each shard has only its heads' part
    ],
)
def test_a_wrong_group_is_rejected_and_named(ranks, mistake, named):
    result = ranks["wrong"][mistake]
    assert not result["kept"]
    assert named in result["reason"]
    assert result["error"] is None or result["error"] > 0.01


@pytest.mark.parametrize(
    ("family", "style"),
    [("gpt2", "MatrixParallel(3)"), ("qwen3", "register_hook"), ("transformer", "Multihead")],
)
def test_the_printed_code_trains_like_the_plain_model(ranks, family, style):
    error, code = ranks["code"][family]
    assert style in code
    assert 0 < error < 1e-14


def test_a_group_that_no_gradient_reaches_is_not_proved(ranks):
    assert "no gradient reaches a" in ranks["problems"]["unused"]


def test_an_optimizer_step_is_part_of_the_proof(ranks):
    assert ranks["problems"]["Clipped"] is None
    assert "optimizer needs full parameters: the updated" in ranks["problems"]["OwnNorms"]
    assert "Adafactor needs full parameters" in ranks["problems"]["Adafactor"]


def test_state_is_part_of_the_proof(ranks):
    """A buffer that depended on the hidden units differed between shards, from the second step on.
    And a model that counts its calls was compared with itself one call later."""
    [observer], [counter] = (ranks["small"][name]["groups"] for name in ("Observer", "Counter"))
    assert not observer["kept"]
    assert "next step" in observer["reason"]
    assert counter["kept"]


def test_a_row_whose_result_changes_in_place_is_split_in_our_own_style(ranks):
    plan = ranks["small"]["InPlace"]
    assert plan["problem"] is None
    assert [group["own_style"] for group in plan["groups"] if group["kept"]] == [True]


def test_a_branch_of_another_sample_is_part_of_the_proof(ranks):
    """The plan was proved on two samples. A third one took a branch that broke the run."""
    assert ranks["small"]["Branching"]["problem"] is not None
    assert "branch" in ranks["small"]["Doubling"]["problem"]


def test_a_branch_must_not_depend_on_values_that_differ_between_shards(ranks):
    """No sample of the proof takes the branch of `Reading`, but each shard reads its own mean."""
    [reading], [after] = (ranks["small"][name]["groups"] for name in ("Reading", "ReadingAfter"))
    assert not reading["kept"]
    assert "reads values between" in reading["reason"]
    assert after["kept"]


@pytest.mark.parametrize(
    ("model", "split"),
    [
        ("plain", ["words", "head"]),
        ("tied", ["head + words"]),
        ("padding", ["head + words"]),
        ("two", ["words", "other", "head"]),
        ("subclass", ["words", "head"]),  # its own forward calls that of nn.Embedding
        ("in place", ["words", "head"]),
        ("smoothed", ["words", "head"]),
        ("smoothed in place", ["words"]),  # the gathered logits cannot be changed in place
        ("ignoring", ["head + words"]),
        ("squared", ["words", "head"]),
        ("shared", ["head + words"]),  # and another embedding with the same weight
        ("own log-softmax", ["words", "head"]),
        ("property", []),
        ("uneven", []),
        ("max_norm", ["head"]),
        ("sparse", ["head"]),
        ("frequency", ["head"]),
    ],
)
def test_embeddings_and_heads_are_split_by_words(ranks, model, split):
    plan = ranks["vocabulary"]["plans"][model]
    kept = [group for group in plan["groups"] if group["words"] and group["kept"]]
    assert plan["problem"] is None
    assert [" + ".join([*g["columns"], g["row"]]).strip(" +") for g in kept] == split
    assert all(group["error"] < 1e-14 for group in kept)


@pytest.mark.parametrize(
    ("model", "split"),
    [
        ("tied", True),
        ("in place", True),
        ("ignoring", True),
        ("squared", True),
        ("smoothed", False),
        ("own log-softmax", False),
    ],
)
def test_a_loss_reads_split_logits_if_torch_can(ranks, model, split):
    groups = ranks["vocabulary"]["plans"][model]["groups"]
    assert [g["split_loss"] for g in groups if "head" in g["columns"]] == [split]


@pytest.mark.parametrize(
    ("model", "layer", "named"),
    [
        ("smoothed in place", "head", "modified inplace"),
        ("property", "words", "its weight is also used by the model"),
        ("uneven", "words", "17 words cannot be split evenly over 2 shards, but 18 can"),
        ("max_norm", "words", "max_norm"),
        ("sparse", "words", "sparse"),
        ("frequency", "words", "scale_grad_by_freq"),
    ],
)
def test_an_embedding_or_head_that_stays_whole_has_a_reason(ranks, model, layer, named):
    plan = ranks["vocabulary"]["plans"][model]
    reasons = dict(plan["left"])
    reasons |= {name: g["reason"] for g in plan["groups"] for name in (*g["columns"], g["row"])}
    assert named in reasons[layer]


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("wrong range", "output 0.1"),  # only looking up all words shows this
        ("no mask", "output 0.1"),
        ("no sum", "output 0."),
        ("untied", "gradient of layers.1.weight"),
        ("rows of the head", "reduction dim"),
        ("logits not gathered", "output 0.0 has a different shape"),
        ("no sum of input gradients", "gradient of input 0.0"),
    ],
)
def test_a_wrong_split_by_words_is_rejected_and_named(ranks, mistake, named):
    assert ranks["vocabulary"]["mistakes"]["none"]["kept"]
    result = ranks["vocabulary"]["mistakes"][mistake]
    assert not result["kept"]
    assert named in result["reason"]


def test_a_word_that_no_shard_has_is_an_error(ranks):
    """Each shard would have looked up zero for it."""
    assert "16 words" in ranks["vocabulary"]["unknown word"]


def test_replicated_parameters_are_copied_from_the_first_shard(ranks):
    """Rounding made replicated parameters differ between shards (T5, on a busy machine)."""
    split, replicated = ranks["aligned"]
    assert split == pytest.approx(1.0)
    assert replicated == 0.0


def test_shards_that_disagree_on_the_loss_stop(ranks):
    rounded, nan, wrong = ranks["losses"]
    assert rounded is None
    assert nan is None
    assert "step 7" in wrong


def test_cp_splits_these_families(ranks):
    rows = ranks["sequence"]["rows"]
    table = (PAGES / "cp.md").read_text().splitlines()
    assert [row for row in rows if row not in table] == []
    assert "| ViT | 2 of 2 | 3 + 2 |" in rows


@pytest.mark.parametrize("trick", ["plain", "mask of each head", "skip"])
def test_a_split_sequence_is_equal(ranks, trick):
    """With `skip`, the model uses the first block's output itself, so it needs the whole output."""
    plan = ranks["sequence"]["plans"][trick]
    assert plan["problem"] is None
    assert plan["length"] == 7
    assert [block["kept"] for block in plan["blocks"]] == [True, True]
    assert all(0 < block["error"] < 1e-14 for block in plan["blocks"])
    assert plan["blocks"][1]["after"] == ("" if trick == "skip" else "blocks.0")


@pytest.mark.parametrize(
    ("trick", "named"),
    [
        ("position", "differs by"),  # counts tokens from the start of its part
        ("mean", "differs by"),  # mixes tokens outside of attention
        ("batch norm", "differs by"),
        ("manual", "does not call"),
        ("noise", "random numbers"),
        ("one rank", "three tokens"),  # the other rank must not wait for this one
        ("tied", "in the whole model, the gradient of embedding.weight"),
        ("parameters not summed", "gradient of norm"),
        ("attention to a part", "differs by"),
        ("arguments not summed", "gradient of input 0.1"),
        ("wrong part", "should have 3 tokens"),
        ("another argument", "3 tensors, but 2"),
    ],
)
def test_a_wrong_split_is_rejected_and_named(ranks, trick, named):
    plan = ranks["sequence"]["plans"][trick]
    assert named in plan["problem"]
