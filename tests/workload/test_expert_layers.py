"""Which modules may be expert layers, and the roles of the tensors in their calls."""

import torch
from torch import nn

from paralab.workload.expert_layers import ExpertCall, read_call, stacked_experts
from paralab.workload.load import load_workload
from tests.worker.expert_models import Experts, Separate

TOKENS, CHOSEN, WEIGHTS = torch.randn(5, 8), torch.zeros(5, 2).long(), torch.randn(5, 2)


def test_the_experts_and_the_modules_around_them_that_have_as_many_rows():
    """The gate of a token also has a row for each expert."""
    model = load_workload("moe:tiny").model()
    names = [f"{block}.feed_forward{inner}" for block in (1, 2) for inner in ("", ".experts")]
    assert stacked_experts(model) == dict.fromkeys(names, 4)
    assert stacked_experts(nn.ModuleDict({"own": Experts(6)})) == {"own": 6}


def test_what_is_not_stacked():
    model = nn.Sequential(Separate(), nn.Conv1d(4, 4, 3), nn.Linear(4, 4), nn.LayerNorm(4))
    assert stacked_experts(model) == {}
    assert stacked_experts(load_workload("gpt:tiny").model()) == {}


def test_the_roles_follow_from_shapes_and_dtypes():
    assert read_call(((TOKENS, CHOSEN, WEIGHTS), {})) == ExpertCall(0, 1, 2)
    assert read_call(((TOKENS,), {"weights": WEIGHTS, "index": CHOSEN})) == ExpertCall(0, 2, 1)
    assert read_call(((WEIGHTS, TOKENS, CHOSEN), {})) == ExpertCall(1, 2, 0)
    assert read_call(((TOKENS, CHOSEN[:, 0], WEIGHTS[:, 0]), {})) == ExpertCall(0, 1, 2)
    # If tokens have as many features as choices, they come first.
    assert read_call(((TOKENS[:, :2], CHOSEN, WEIGHTS), {})) == ExpertCall(0, 1, 2)


def test_other_calls():
    assert read_call(((TOKENS, CHOSEN), {})) is None
    assert read_call(((TOKENS, CHOSEN, WEIGHTS, WEIGHTS), {})) is None
    assert read_call(((TOKENS[:4], CHOSEN, WEIGHTS), {})) is None
    assert read_call(((TOKENS[None], CHOSEN, WEIGHTS), {})) is None
    assert read_call(((TOKENS, CHOSEN, WEIGHTS[:, :1]), {})) is None
    assert read_call(((TOKENS, CHOSEN > 0, WEIGHTS), {})) is None
