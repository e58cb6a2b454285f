"""Experts: each token uses the ones with the highest scores, no matter what else is in its
batch."""

import torch

from paralab.workload.gpt import real_bytes
from paralab.workload.load import load_workload
from paralab.workload.moe import Routed


def experts():
    torch.manual_seed(0)
    layer = Routed(dim=8, experts=4, chosen=2).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def test_a_token_gets_the_weighted_outputs_of_its_two_best_experts():
    layer, token = experts(), torch.randn(8, dtype=torch.float64)
    scores = layer.gate(token).softmax(-1)
    first, second = scores.argsort(descending=True)[:2].tolist()
    total = scores[first] + scores[second]
    expected = sum(
        scores[e]
        / total
        * (torch.nn.functional.gelu(token @ layer.experts.up[e]) @ layer.experts.down[e])
        for e in (first, second)
    )
    torch.testing.assert_close(layer(token[None])[0], expected, rtol=1e-12, atol=0)


def test_tokens_do_not_depend_on_each_other_and_use_all_experts():
    layer, tokens = experts(), torch.randn(3, 50, 8, dtype=torch.float64)
    together = layer(tokens)
    alone = torch.stack([layer(token[None])[0] for token in tokens.flatten(0, 1)])
    torch.testing.assert_close(together.flatten(0, 1), alone, rtol=1e-12, atol=1e-12)
    together.sum().backward()
    assert all(float(layer.experts.up.grad[expert].norm()) > 0 for expert in range(4))


def test_an_expert_that_no_token_chooses_has_a_zero_gradient():
    """The gradient is zero, not missing: DDP would wait for a missing one."""
    layer = experts()
    layer(torch.randn(1, 8, dtype=torch.float64)).sum().backward()
    idle = [expert for expert in range(4) if not layer.experts.up.grad[expert].any()]
    assert len(idle) == 2


def test_parts_of_a_batch_add_up():
    workload = load_workload("moe:tiny")
    torch.manual_seed(0)
    model = workload.model().double()
    inputs, targets = (tensor[:7] for tensor in workload.data)

    def gradient(start, stop):
        batch = inputs[start:stop], targets[start:stop]
        model.zero_grad()
        (workload.loss(model(batch[0]), batch[1]) * real_bytes(batch)).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole, parts = gradient(0, 7), gradient(0, 3) + gradient(3, 7)
    assert float(whole.norm()) > 0
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-10)
